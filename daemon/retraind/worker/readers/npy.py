"""NumPy's .npy format to rows of float64, any byte order and either memory order, streamed.

Only the header is parsed, by numpy itself; nothing is unpickled, ever. A file in Fortran order is copied to an
unnamed temporary file first, since its rows lie scattered. Raises DataError object_dtype, shape, truncated, malformed,
no_rows, unsupported_format. Format: numpy.lib.format's documentation, versions 1.0 to 3.0.
"""

# N rows of a block, D columns
# ruff: noqa: N803, N806  (arrays carry their shape)

import io
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.readers import spill
from retraind.worker.readers.columns import Column, position_names
from retraind.worker.readers.tally import Tally

MAGIC = b"\x93NUMPY"
BLOCK_BYTES = 4 * 2**20
# numpy's own bound for a header that is evaluated; a header of plain columns has about a hundred bytes.
MAX_HEADER_BYTES = 10_000

Floats = NDArray[np.float64]


class Content(Protocol):
    """Where the bytes of an array come from: a file, or a member of an archive."""

    def read(self, size: int) -> bytes: ...
    def peek(self, size: int) -> bytes: ...


class NpyReader:
    """Reads one .npy file of shape (rows, columns). Columns have no names, so they are column_0 and so on."""

    format = "npy"

    def __init__(self, source: Content, limits: DataConfig, spill_dir: Path | None) -> None:
        self._source = source
        self._spill_dir = spill_dir
        head = io.BytesIO(source.peek(MAX_HEADER_BYTES + 16))
        shape, self._is_fortran, self._dtype = read_header(head)
        source.read(head.tell())
        self._num_rows, self._num_columns = _checked_shape(shape, self._dtype, limits)
        self._block_rows = max(1, BLOCK_BYTES // (self._num_columns * self._dtype.itemsize))
        self._blocks = self._fortran_blocks() if self._is_fortran else self._c_blocks()
        self._first_ND = next(self._blocks)
        is_filled_D: list[bool] = np.any(~np.isnan(self._first_ND), axis=0).tolist()
        names = position_names(self._num_columns)
        self.columns = [
            Column(name, "number" if is_filled else "empty") for name, is_filled in zip(names, is_filled_D, strict=True)
        ]

    def rows(self, metric_names: Sequence[str], tally: Tally) -> Iterator[Floats]:
        """Yields float64 arrays of shape (N, D), as DelimitedReader.rows does; a problem's line is its row."""
        positions = {column.name: index for index, column in enumerate(self.columns)}
        chosen = [positions[name] for name in metric_names]
        first_row, rows_ND = 1, self._first_ND
        del self._first_ND
        while len(rows_ND):
            picked_ND = rows_ND[:, chosen]
            lines = range(first_row, first_row + len(rows_ND))
            if tally.label is not None and tally.label in positions:
                for line, value in zip(lines, rows_ND[:, positions[tally.label]].tolist(), strict=True):
                    tally.labelled(line, f"{value:.17g}")
            yield tally.usable_rows(picked_ND, partial(_place, picked_ND, first_row, chosen), lines)
            first_row += len(rows_ND)
            rows_ND = next(self._blocks, rows_ND[:0])

    def _c_blocks(self) -> Iterator[Floats]:
        for start in range(0, self._num_rows, self._block_rows):
            num_rows = min(self._block_rows, self._num_rows - start)
            values = np.frombuffer(self._take(num_rows * self._num_columns), self._dtype)
            yield as_float64(values).reshape(num_rows, self._num_columns)
        self._check_end()

    def _fortran_blocks(self) -> Iterator[Floats]:
        num_values = self._num_rows * self._num_columns
        with spill.opened(self._spill_dir, num_values * self._dtype.itemsize) as file:
            step = BLOCK_BYTES // self._dtype.itemsize
            for start in range(0, num_values, step):
                file.write(self._take(min(step, num_values - start)))
            self._check_end()
            for start in range(0, self._num_rows, self._block_rows):
                yield self._gather(file, start, min(self._block_rows, self._num_rows - start))

    def _gather(self, file: IO[bytes], start: int, num_rows: int) -> Floats:
        """Some rows of all columns, each column from its own place."""
        rows_ND = np.empty((num_rows, self._num_columns))
        for column in range(self._num_columns):
            file.seek((column * self._num_rows + start) * self._dtype.itemsize)
            values = np.frombuffer(file.read(num_rows * self._dtype.itemsize), self._dtype)
            rows_ND[:, column] = as_float64(values)
        return rows_ND

    def _take(self, num_values: int) -> bytes:
        data = self._source.read(num_values * self._dtype.itemsize)
        if len(data) < num_values * self._dtype.itemsize:
            raise DataError(
                "truncated",
                f"the header says {self._num_rows:,} rows of {self._num_columns:,} columns, but the file ends before",
                remedy="the copy was cut short: copy the file again",
            )
        return data

    def _check_end(self) -> None:
        if self._source.read(1):
            raise DataError(
                "malformed",
                f"there are bytes after the {self._num_rows:,} rows that the header says",
                remedy="write the file anew with numpy.save",
            )


def as_float64(values: NDArray[np.generic]) -> Floats:
    """A copy as float64. A signalling NaN stays NaN, a long double beyond float64 is infinite; both are counted."""
    with np.errstate(invalid="ignore", over="ignore"):
        return values.astype(np.float64)


def read_header(head: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """Shape, order and type of the array that begins here; the header is taken."""
    readers = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
    try:
        version = npy_format.read_magic(head)
        if version not in readers:  # version 3 is for field names beyond latin-1, so for structured arrays only
            raise _unsupported(f"version {version[0]}.{version[1]} of the format")
        with warnings.catch_warnings(action="ignore"):  # numpy advises to save files of Python 2 anew
            shape, is_fortran, dtype = readers[version](head, max_header_size=MAX_HEADER_BYTES)
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError) as error:
        raise DataError(
            "malformed", f"the header of the .npy file can not be read: {error}", remedy="write it with numpy.save"
        ) from error
    return shape, is_fortran, dtype


def _checked_shape(shape: tuple[int, ...], dtype: np.dtype[np.generic], limits: DataConfig) -> tuple[int, int]:
    if dtype.hasobject:
        raise DataError(
            "object_dtype", "the array holds Python objects, which are never unpickled", remedy="save it as float64"
        )
    if dtype.kind not in "fiu":
        raise _unsupported(f"elements of type {dtype}")
    if len(shape) == 2 and shape[0] == 0:
        raise DataError("no_rows", f"the array has the shape {shape}", remedy="write rows of numbers")
    if len(shape) != 2 or shape[0] < shape[1] or min(shape) < 1:
        raise DataError(
            "shape",
            f"the array has the shape {shape}; rows x columns with at least as many rows as columns is expected",
            remedy="save the transposed array" if len(shape) == 2 else "save a two-dimensional array",
        )
    if shape[1] > limits.max_columns:
        raise DataError("too_many_columns", f"{shape[1]:,} columns; {limits.max_columns:,} are allowed")
    return shape[0], shape[1]


def _unsupported(what: str) -> DataError:
    return DataError("unsupported_format", f"a .npy file with {what}", remedy="save it as float64")


def _place(rows_ND: Floats, first_row: int, chosen: list[int], row: int, metric: int) -> tuple[int, int, str]:
    return first_row + row, chosen[metric] + 1, str(rows_ND[row, metric])
