"""What could not be used of one file: counts by reason, and the first problems with their place.

Owns the closed set of reasons and the rule for values that are missing: a row is used as long as one of its metrics has
a value. Memory is bounded by report.MAX_PROBLEMS whatever the file holds. Raises nothing.
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

# Why a row is dropped: `missing` and `non_finite` if it has no value at all, by its first cell. Keys of
# Dataset.num_dropped and labels of a metric, so a closed set.
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
        self.num_non_finite_cells = 0  # of the rows that are used

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

    def usable_rows(
        self,
        rows_ND: NDArray[np.float64],
        place: Callable[[int, int], tuple[int, int | None, str]],
        lines: Sequence[int] | None = None,  # noqa: ARG002  (for who keeps a log of rows)
    ) -> NDArray[np.float64]:
        """The rows that have a value, with NaN for each cell that has none; the others are dropped and counted.

        A value is missing where it is NaN, and where float32 can not hold it, which is counted apart. `place` gives
        line, column and text of a cell of the block by its row and metric, for the first problems only; `lines` are
        those of all rows, if known.
        """
        is_usable_ND = np.abs(rows_ND) <= MAX_MAGNITUDE  # False for NaN
        if is_usable_ND.all():
            return rows_ND
        is_kept_N = is_usable_ND.any(axis=1)
        lost_N = np.flatnonzero(~is_kept_N)
        is_missing_N = np.isnan(rows_ND[lost_N, 0])
        self.count("missing", int(is_missing_N.sum()))
        self.count("non_finite", int((~is_missing_N).sum()))
        for row, is_missing in zip(lost_N[:MAX_PROBLEMS], is_missing_N, strict=False):
            self.note("missing" if is_missing else "non_finite", *place(int(row), 0))
        kept_ND = rows_ND[is_kept_N]
        is_gap_ND = ~is_usable_ND[is_kept_N]
        self.num_non_finite_cells += int(is_gap_ND.sum()) - int(np.isnan(kept_ND).sum())
        kept_ND[is_gap_ND] = np.nan
        return kept_ND
