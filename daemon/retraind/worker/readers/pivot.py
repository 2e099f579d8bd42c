"""From long to wide: samples of time series to one row a time stamp, a column a series.

Owns three rules. Stamps that lie less than half a step apart are one row, as long as no series comes twice in it; the
step is the median distance between neighbouring samples of one series. A series without a sample in a row is a missing
cell there: nothing is filled. Of equal series and time the same value counts once, and two values are refused: nobody
can tell which was meant. Rows are in order of time and columns in order of name, whatever the order of the file.
Raises DataError malformed, no_rows.
"""

# N rows of a block, D metrics, S samples
# ruff: noqa: N803, N806  (arrays carry their shape)

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from retraind.errors import DataError
from retraind.printable import printable
from retraind.worker.readers.columns import Column
from retraind.worker.readers.samples import Samples
from retraind.worker.readers.source import Source
from retraind.worker.readers.tally import Tally

# Cells of a block: 4 MiB of float64.
BLOCK_CELLS = 2**19

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class SeriesReader:
    """The wide table of a file of series. `columns` are all series, in order of name.

    With `exact`, stamps are one row only if they are equal: where the producer put all series on one grid itself.
    """

    def __init__(self, format_: str, source: Source, samples: Samples, *, exact: bool = False) -> None:
        if not samples.instants:
            raise DataError("no_rows", "there is no sample of a number in the file", remedy="write samples of series")
        self.format = format_
        self._source = source
        self._names = sorted([*samples.codes, *samples.text_names])
        self._codes = samples.codes
        instants_S, self._series_S, self._values_S, self._lines_S = _in_order(samples)
        self._row_S = _rows_of_samples(instants_S, self._series_S, exact=exact)
        self._instants_N = instants_S[np.flatnonzero(np.diff(self._row_S, prepend=-1))]
        has_value = set(np.unique(self._series_S[~np.isnan(self._values_S)]).tolist())
        self.columns = [Column(printable(name), self._kind(name, has_value)) for name in self._names]

    @property
    def num_rows(self) -> int:
        """How many rows there are, the ones with missing cells included."""
        return int(self._row_S[-1]) + 1

    def _kind(self, name: str, has_value: set[int]) -> str:
        if name not in self._codes:
            return "text"
        return "number" if self._codes[name] in has_value else "empty"

    def rows(self, metric_names: Sequence[str], tally: Tally) -> Iterator[Floats]:
        """Yields float64 arrays of shape (N, D), as DelimitedReader.rows does.

        The line of a problem is that of the row's first sample in order of time, or the row where lines are unknown.
        """
        names = {column.name: name for column, name in zip(self.columns, self._names, strict=True)}
        position_of_code = np.full(len(self._codes), -1)
        for position, name in enumerate(metric_names):
            position_of_code[self._codes[names[name]]] = position
        block_rows = max(1, BLOCK_CELLS // len(metric_names))
        for start in range(0, self.num_rows, block_rows):
            self._source.read(0)  # reads nothing, since all was read, but says that we are alive
            stop = min(start + block_rows, self.num_rows)
            first, last = np.searchsorted(self._row_S, [start, stop])
            position_S = position_of_code[self._series_S[first:last]]
            is_used_S = position_S >= 0
            rows_ND = np.full((stop - start, len(metric_names)), np.nan)
            rows_ND[self._row_S[first:last][is_used_S] - start, position_S[is_used_S]] = self._values_S[first:last][
                is_used_S
            ]
            starts_N = first + np.searchsorted(self._row_S[first:last], np.arange(start, stop))

            def place(
                row: int, metric: int, start: int = start, starts_N: Integers = starts_N
            ) -> tuple[int, None, str]:
                line = int(self._lines_S[starts_N[row]]) or start + row + 1
                return line, None, metric_names[metric]

            # Rows are in order of time, which the lines need not be: a row is known by its number.
            numbers = range(start + 1, stop + 1)
            tally.stamped(numbers, self._instants_N[start:stop])
            yield tally.usable_rows(rows_ND, place, numbers)


def _in_order(samples: Samples) -> tuple[Integers, NDArray[np.int32], Floats, Integers]:
    """Takes the samples by time and series, each pair once. Array by array: two copies of all are never held."""
    instants_S = np.frombuffer(samples.instants, np.int64)
    series_S = np.frombuffer(samples.series, np.int32)
    values_S = np.frombuffer(samples.values, np.float64)
    # Of equal series and time, the ones without a value come last and give way.
    order_S = np.lexsort((np.isnan(values_S), series_S, instants_S))
    instants_S = instants_S[order_S]
    samples.instants = array("q")
    series_S = series_S[order_S]
    samples.series = array("i")
    values_S = values_S[order_S]
    samples.values = array("d")
    lines_S = np.frombuffer(samples.lines, np.int64)[order_S]
    samples.lines = array("q")
    is_again_S = np.zeros(len(instants_S), bool)
    is_again_S[1:] = (np.diff(instants_S) == 0) & (np.diff(series_S) == 0)
    if not is_again_S.any():
        return instants_S, series_S, values_S, lines_S
    differs_S = is_again_S & ~np.isnan(values_S)
    differs_S[1:] &= values_S[1:] != values_S[:-1]
    if differs_S.any():
        clash = int(np.flatnonzero(differs_S)[0])
        raise _two_values(samples, int(series_S[clash]), values_S[clash - 1 : clash + 1], lines_S[clash])
    kept_S = ~is_again_S
    return instants_S[kept_S], series_S[kept_S], values_S[kept_S], lines_S[kept_S]


def _two_values(samples: Samples, code: int, values: Floats, line: np.int64) -> DataError:
    name = next(name for name, other in samples.codes.items() if other == code)
    return DataError(
        "malformed",
        f"the series {printable(name)[:80]} has two values at one time, {values[0]:.12g} and {values[1]:.12g}",
        line=int(line) or None,
        remedy="write one value a series and time, or time stamps fine enough to tell the values apart",
    )


def _rows_of_samples(instants_S: Integers, series_S: NDArray[np.int32], *, exact: bool) -> Integers:
    """The number of the row of each sample, from 0.

    Samples without a wide gap between them are a chain. A chain that is short, with each series once, is a row; only
    the others, of which a file on a grid has none, are looked at one by one.
    """
    by_series_S = np.argsort(series_S, kind="stable")
    has_next_S = np.diff(series_S[by_series_S]) == 0
    steps = np.diff(instants_S[by_series_S])[has_next_S]
    reach = 1.0 if exact or not len(steps) else max(1.0, float(np.median(steps)) / 2)
    begins_S = np.ones(len(instants_S), bool)
    begins_S[1:] = np.diff(instants_S) >= reach
    chain_S = np.cumsum(begins_S) - 1
    firsts = np.flatnonzero(begins_S)
    lasts = np.append(firsts[1:], len(instants_S)) - 1
    is_one_row = instants_S[lasts] - instants_S[firsts] < reach
    chain_S = chain_S[by_series_S]
    is_one_row[chain_S[1:][has_next_S & (np.diff(chain_S) == 0)]] = False
    del chain_S, by_series_S, has_next_S, steps
    for chain in np.flatnonzero(~is_one_row).tolist():
        part = slice(firsts[chain], lasts[chain] + 1)
        begins_S[part] = _begins_of_chain(instants_S[part].tolist(), series_S[part].tolist(), reach)
    return np.cumsum(begins_S) - 1


def _begins_of_chain(instants: list[int], series: list[int], reach: float) -> list[bool]:
    """Which samples of a chain begin a row: the first one, what is out of its reach, and a series that comes again."""
    begins = [False] * len(instants)
    begin, seen, start = instants[0] - reach, set[int](), 0
    for _, group in groupby(instants):
        stop = start + sum(1 for _ in group)  # equal stamps are never torn apart
        here = series[start:stop]
        if instants[start] - begin >= reach or not seen.isdisjoint(here):
            begins[start], begin, seen = True, instants[start], set()
        seen.update(here)
        start = stop
    return begins
