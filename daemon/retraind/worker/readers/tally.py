"""What could not be used of one file: counts by reason, and the first problems with their place.

Owns the closed set of reasons and the rule for numbers that can not be used. Memory is bounded by report.MAX_PROBLEMS
whatever the file holds. Raises nothing.
"""

# N rows of a block, D metrics
# ruff: noqa: N803, N806  (arrays carry their shape)

from bisect import insort
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from retraind.printable import printable
from retraind.report import MAX_PROBLEMS, Problem
from retraind.worker.readers.numbers import MAX_MAGNITUDE

# Why a row is dropped. Keys of Dataset.num_dropped and labels of a metric, so a closed set.
REASONS = ("missing", "non_finite", "not_a_number", "ragged", "malformed", "truncated_tail")
# Enough to recognise a cell in the file; a report is read by people.
MAX_TEXT = 60


class Tally:
    """Counts dropped rows. `problems` are the first by line, whatever the order in which they are told."""

    # A column whose text goes with each row; training has no use for one.
    label: str | None = None

    def __init__(self) -> None:
        self.num_dropped = dict.fromkeys(REASONS, 0)
        self.problems: list[Problem] = []

    @property
    def total(self) -> int:
        return sum(self.num_dropped.values())

    def count(self, reason: str, number: int = 1) -> None:
        """Counts rows; `note` tells about the first of them."""
        self.num_dropped[reason] += number

    def note(self, reason: str, line: int, column: int | None = None, text: str | bytes = "") -> None:
        """Keeps a problem if it is among the first by line."""
        shown = printable(text[:MAX_TEXT])
        insort(self.problems, Problem(line=line, reason=reason, column=column, text=shown), key=lambda p: p.line)
        del self.problems[MAX_PROBLEMS:]

    def drop(self, reason: str, line: int, column: int | None = None, text: str | bytes = "") -> None:
        """Counts one row and notes it."""
        self.count(reason)
        self.note(reason, line, column, text)

    def labelled(self, line: int, text: str) -> None:
        """Told the text of the column `label` in each row, where one is asked for."""

    def stamped(self, lines: Sequence[int], instants_N: NDArray[np.int64]) -> None:
        """Told when rows were, in nanoseconds since 1970; small numbers are no times, but numbers of scrapes."""

    def passed(self, line: int) -> None:
        """Told of a row that the reader found usable by itself, without `usable_rows`."""

    def usable_rows(
        self,
        rows_ND: NDArray[np.float64],
        place: Callable[[int, int], tuple[int, int | None, str]],
        lines: Sequence[int] | None = None,  # noqa: ARG002  (for who keeps a log of rows)
    ) -> NDArray[np.float64]:
        """The rows whose cells are all finite. Counts the others; the first bad cell of a row gives the reason.

        NaN counts as missing, what float32 can not hold as non-finite. `place` gives line, column and text of a cell
        of the block by its row and metric, for the first problems only; `lines` are those of all rows, if known.
        """
        usable_ND = np.abs(rows_ND) <= MAX_MAGNITUDE  # False for NaN
        usable_N = usable_ND.all(axis=1)
        if usable_N.all():
            return rows_ND
        bad_N = np.flatnonzero(~usable_N)
        metric_N = np.argmin(usable_ND[bad_N], axis=1)
        missing_N = np.isnan(rows_ND[bad_N, metric_N])
        self.count("missing", int(missing_N.sum()))
        self.count("non_finite", int((~missing_N).sum()))
        for row, metric, is_missing in zip(bad_N[:MAX_PROBLEMS], metric_N, missing_N, strict=False):
            self.note("missing" if is_missing else "non_finite", *place(int(row), int(metric)))
        return rows_ND[usable_N]
