"""When each row of a file was: a tally that keeps the time stamps of the rows of a block, in seconds.

Owns the way from what readers tell (the text of a column, or instants) to one number a row; a row whose stamp can not
be read has NaN. Holds the rows of one block only, until they are taken. Raises nothing.
"""

# N rows of a block, D metrics
# ruff: noqa: N803, N806  (arrays carry their shape)

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from retraind.worker.readers.numbers import MAX_MAGNITUDE
from retraind.worker.readers.tally import Tally
from retraind.worker.readers.timestamps import Clock

Floats = NDArray[np.float64]

# Without time stamps a scrape is known by its number, of which there are fewer than nanoseconds in a quarter hour.
EARLIEST_NS = 10**12


class RowTimes:
    """The times of rows by their lines, as they are told."""

    def __init__(self) -> None:
        self._clock = Clock()
        self._seconds: dict[int, float] = {}

    def labelled(self, line: int, text: str) -> None:
        """A time stamp as text."""
        try:
            self._seconds[line] = self._clock.instant(text.strip()) / 1e9
        except ValueError:
            self._seconds[line] = math.nan

    def stamped(self, lines: Sequence[int], instants_N: NDArray[np.int64]) -> None:
        """Instants in nanoseconds since 1970."""
        seconds_N = np.where(np.abs(instants_N) > EARLIEST_NS, instants_N / 1e9, np.nan)
        self._seconds |= zip(lines, seconds_N.tolist(), strict=True)

    def take(self, lines: Sequence[int]) -> Floats:
        """The seconds of these rows. What was told of other ones goes."""
        seconds_N = np.array([self._seconds.get(line, math.nan) for line in lines], dtype=np.float64)
        self._seconds = {}
        return seconds_N


class TimedTally(Tally):
    """A tally that knows the lines and the times of the rows that a reader yields. `label` is the column of times."""

    def __init__(self, label: str | None) -> None:
        super().__init__()
        self.label = label
        self._times = RowTimes()
        self._lines: list[int] = []

    def labelled(self, line: int, text: str) -> None:
        self._times.labelled(line, text)

    def stamped(self, lines: Sequence[int], instants_N: NDArray[np.int64]) -> None:
        self._times.stamped(lines, instants_N)

    def usable_rows(
        self,
        rows_ND: Floats,
        place: Callable[[int, int], tuple[int, int | None, str]],
        lines: Sequence[int] | None = None,
    ) -> Floats:
        is_kept_N = (np.abs(rows_ND) <= MAX_MAGNITUDE).any(axis=1)
        if lines is None:
            lines = [place(row, 0)[0] for row in range(len(rows_ND))]
        self._lines += np.asarray(lines, np.int64)[is_kept_N].tolist()
        return super().usable_rows(rows_ND, place, lines)

    def take(self) -> tuple[list[int], Floats]:
        """The lines and the times of the rows of the block that a reader has just yielded."""
        lines, self._lines = self._lines, []
        return lines, self._times.take(lines)
