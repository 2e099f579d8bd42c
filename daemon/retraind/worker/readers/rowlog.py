"""A tally that gives up no row: each row of a file in its order, with its line, its label and why it can not be used.

Training leaves out what it can not use; whoever scores a file wants as many answers as rows. Readers take this for the
tally that it is. Holds the rows of one block only, until they are taken. Raises nothing.
"""

# N rows of a block, D metrics
# ruff: noqa: N803, N806  (arrays carry their shape)

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retraind.printable import printable
from retraind.worker.readers.numbers import MAX_MAGNITUDE
from retraind.worker.readers.rowtimes import EARLIEST_NS, RowTimes
from retraind.worker.readers.tally import Tally


@dataclass(frozen=True)
class Row:
    """One row of a file. `label` is the text of the label's column, `reason` is empty for a row that can be used."""

    line: int
    label: str
    reason: str


class RowLog(Tally):
    """Rows of numbers pass, NaN where a value is missing; the others are remembered beside."""

    def __init__(self, label: str | None = None, *, is_timed: bool = False) -> None:
        super().__init__()
        self.label = label
        self._labels: dict[int, str] = {}
        self._passed: list[tuple[int, str]] = []
        self._lost: list[tuple[int, str]] = []
        self._times = RowTimes() if is_timed else None

    def drop(self, reason: str, line: int, column: int | None = None, text: str | bytes = "") -> None:
        super().drop(reason, line, column, text)
        self._lost.append((line, reason))

    def labelled(self, line: int, text: str) -> None:
        self._labels[line] = text
        if self._times:
            self._times.labelled(line, text)

    def stamped(self, lines: Sequence[int], instants_N: NDArray[np.int64]) -> None:
        if self._times:
            self._times.stamped(lines, instants_N)
        texts = np.datetime_as_string(instants_N.astype("datetime64[ns]"), unit="ms", timezone="UTC").tolist()
        is_time_N = np.abs(instants_N) > EARLIEST_NS
        self._labels |= {line: text for line, text, is_time in zip(lines, texts, is_time_N, strict=True) if is_time}

    def usable_rows(
        self,
        rows_ND: NDArray[np.float64],
        place: Callable[[int, int], tuple[int, int | None, str]],
        lines: Sequence[int] | None = None,
    ) -> NDArray[np.float64]:
        """All rows, with NaN for each value that is missing; one without any has the reason of its first cell."""
        super().usable_rows(rows_ND, place)
        whole_ND = np.where(np.abs(rows_ND) <= MAX_MAGNITUDE, rows_ND, np.nan)
        lost_N = np.flatnonzero(np.isnan(whole_ND).all(axis=1))
        reasons = {row: "missing" if np.isnan(rows_ND[row, 0]) else "non_finite" for row in lost_N.tolist()}
        if lines is None:
            lines = [place(row, 0)[0] for row in range(len(rows_ND))]
        self._passed += [(line, reasons.get(row, "")) for row, line in enumerate(lines)]
        return whole_ND

    def seconds(self, rows: Sequence[Row]) -> NDArray[np.float64]:
        """When the rows were that were taken last, by a log that `is_timed`."""
        assert self._times is not None, "it was asked for"
        return self._times.take([row.line for row in rows])

    def take(self, rows_ND: NDArray[np.float64]) -> tuple[list[Row], NDArray[np.float64]]:
        """The rows of the block that a reader has just yielded, and the same with a row of NaN for each that was lost.

        In the order of the file's lines. What was dropped since the last block comes with this one.
        """
        assert len(self._passed) == len(rows_ND), "a reader told of each row that it yields"
        entries = sorted([*self._lost, *self._passed])
        rows = [Row(line, printable(self._labels.get(line, "")), reason) for line, reason in entries]
        if self._lost:
            lost = {line for line, _ in self._lost}
            whole_ND = np.full((len(rows), rows_ND.shape[1]), np.nan)
            whole_ND[[index for index, row in enumerate(rows) if row.line not in lost]] = rows_ND
            rows_ND = whole_ND
        self._labels, self._passed, self._lost = {}, [], []
        return rows, rows_ND
