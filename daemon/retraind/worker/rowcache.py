"""The cache of scaled rows: a raw file of float32 that is written while the scaler is still being found.

Owns the file's format (C order, little-endian, rows x metrics, no header, NaN for a missing value) and how it gets its
final scale. Raises OSError unchanged and Interrupted through `beat`; on any error the file is removed. Nothing is
synced: it is made anew.

Rows are written by the scaler of the rows so far and brought to the final one by an affine pass over the file. Why
float32 is enough: a value y is off by at most 6e-8 |y|, which in final units is 6e-8 (|z| + |c0 - c| / s). With n0 of N
rows in the first block the total variance is at least (n0/N) (c0 - c)^2, so that the second term is at most
6e-8 sqrt(N/n0): 2e-6 for a file of a thousand blocks. The digits of large counters go in float64, before the rounding.
For a metric with missing values N and n0 count those that are there, and its first block is the first that has one.
"""

# N rows of a block, D metrics
# ruff: noqa: N803, N806  (arrays carry their shape)

import io
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from retraind.report import Scaler
from retraind.worker.readers.source import Beat
from retraind.worker.scaler import Moments, scale, soften

# Read, changed and written back at once: a few milliseconds of disk, and small beside a block of text.
PASS_BYTES = 4 * 2**20
# float32 ends at 3e38; a metric that leaves its first block's range this far behind gets a new provisional scale.
MAX_SCALED = 1e30


@dataclass(frozen=True)
class RowCache:
    """A raw C-order little-endian float32 file of scaled rows, num_rows x num_metrics.

    A missing value is NaN; without `has_missing` there is none. The rows of `breaks`, ascending, do not follow on those
    before them.
    """

    path: Path
    num_rows: int
    num_metrics: int
    has_missing: bool = False
    breaks: tuple[int, ...] = ()


class RowCacheWriter:
    """Writes one cache. A context manager: leaving it by an exception removes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_rows = 0
        self._max_scaled = 0.0
        self._scaler: Scaler | None = None
        self._is_unseen_D = np.zeros(0, dtype=np.bool_)

    def __enter__(self) -> Self:
        self._file = self._path.open("w+b", buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is not None:
            self._path.unlink(missing_ok=True)

    def append(self, rows_ND: NDArray[np.float64], moments: Moments) -> None:
        """Adds rows, shape (N, D). `moments` are of all rows, these included."""
        if not len(rows_ND):
            return
        scaler = self._adopt(moments)
        with np.errstate(over="ignore"):
            scaled_ND = scale(rows_ND, scaler)
        if not np.nanmax(np.abs(scaled_ND)) <= MAX_SCALED:
            self._move(moments.scaler(), np.zeros(rows_ND.shape[1], dtype=np.bool_), lambda _: None, is_last=False)
            scaled_ND = scale(rows_ND, moments.scaler())
        self._max_scaled = max(self._max_scaled, float(np.nanmax(np.abs(scaled_ND))))
        _write_all(self._file, scaled_ND)
        self._num_rows += len(rows_ND)

    def finish(self, moments: Moments, beat: Beat) -> RowCache:
        """Brings all rows to the final scale, values far out softened; constant metrics become exactly 0."""
        self._move(moments.scaler(), moments.is_constant_D, beat, is_last=True)
        return RowCache(self._path, self._num_rows, len(moments.mean_D), bool(moments.num_missing_D.any()))

    def _adopt(self, moments: Moments) -> Scaler:
        """The scaler to write by: of the first rows, and for a metric that had no value there, of the first that do.

        Nothing but NaN stands in the file for such a metric, so that a change of its scale rewrites nothing.
        """
        scaler = moments.scaler()
        if self._scaler is None:
            self._scaler = scaler
        elif self._is_unseen_D.any():
            unseen_D = self._is_unseen_D
            self._scaler = msgspec.structs.replace(
                self._scaler,
                centre=np.where(unseen_D, scaler.centre, self._scaler.centre).tolist(),
                scale=np.where(unseen_D, scaler.scale, self._scaler.scale).tolist(),
            )
        self._is_unseen_D = moments.num_D == 0
        return self._scaler

    def _move(self, target: Scaler, is_constant_D: NDArray[np.bool_], beat: Beat, *, is_last: bool) -> None:
        """Rewrites the file in place from the present scaler to another, some rows at a time."""
        assert self._scaler is not None, "rows were appended"
        centre_D, scale_D = np.asarray(self._scaler.centre), np.asarray(self._scaler.scale)
        gain_D = np.where(is_constant_D, 0.0, scale_D / np.asarray(target.scale))
        offset_D = np.where(is_constant_D, 0.0, (centre_D - np.asarray(target.centre)) / np.asarray(target.scale))
        self._scaler = target
        is_same = (gain_D == 1.0).all() and (offset_D == 0.0).all()  # one block was all of the file
        if is_same and not (is_last and self._max_scaled > (target.soft_limit or math.inf)):
            return
        row_bytes = len(gain_D) * 4
        step = max(1, PASS_BYTES // row_bytes)
        for start in range(0, self._num_rows, step):
            num_rows = min(step, self._num_rows - start)
            self._file.seek(start * row_bytes)
            rows_ND = np.frombuffer(self._file.read(num_rows * row_bytes), "<f4").reshape(num_rows, -1)
            moved_ND = (rows_ND * gain_D + offset_D).astype("<f4")
            if is_last:
                soften(moved_ND, target.soft_limit)
            self._file.seek(start * row_bytes)
            _write_all(self._file, moved_ND)
            beat(None)


def _write_all(file: io.FileIO, rows_ND: NDArray[np.float32]) -> None:
    view = rows_ND.data.cast("B")
    while view:
        view = view[file.write(view) :]
