"""Parquet files to rows of float64, by pyarrow where the worker's interpreter has it (door of pyarrow).

Owns what a column's type means: integers, floats and decimals are numbers, also behind a dictionary; a null is a
missing cell; text, times, true and false, lists and structures are listed and not used. The file is copied to an
unnamed temporary file, since it is read from its end, and read in batches of rows. Raises DataError
unsupported_format where pyarrow is missing, truncated, malformed, no_rows, too_large.
"""

# N rows of a block, D columns of numbers
# ruff: noqa: N806  (arrays carry their shape)

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.printable import printable
from retraind.worker.readers.columns import SAMPLE_ROWS, Column, check_names
from retraind.worker.readers.source import Source
from retraind.worker.readers.tally import Tally

MAGIC, ENCRYPTED_MAGIC = b"PAR1", b"PARE"
BLOCK_BYTES = 4 * 2**20
MAX_SPOOLED_BYTES = 16 * 2**20
# pyarrow holds the columns of a row group while it is read; writers make groups of a tenth of this.
MAX_GROUP_BYTES = 2**30

Floats = NDArray[np.float64]


class ParquetReader:
    """Reads one file. `columns` are those of its schema; what a structure holds inside is none."""

    format = "parquet"

    def __init__(self, source: Source, limits: DataConfig, spill_dir: Path | None) -> None:
        self._arrow, self._parquet = _library(source.name)
        self._names: list[str] = []
        self._numeric: list[int] = []
        self._blocks = self._read(source, limits, None if spill_dir is None else str(spill_dir))
        self._first_ND = next(self._blocks)
        is_filled = dict(zip(self._numeric, np.any(~np.isnan(self._first_ND), axis=0).tolist(), strict=True))
        kinds = {None: "text", True: "number", False: "empty"}
        self.columns = [Column(name, kinds[is_filled.get(index)]) for index, name in enumerate(self._names)]

    def rows(self, metric_names: Sequence[str], tally: Tally) -> Iterator[Floats]:
        """Yields float64 arrays of shape (N, D), as DelimitedReader.rows does; a problem's line is its row."""
        columns = [self._names.index(name) for name in metric_names]
        chosen = [self._numeric.index(column) for column in columns]
        first_row, rows_ND = 1, self._first_ND
        del self._first_ND
        while len(rows_ND):
            picked_ND = rows_ND[:, chosen]
            lines = range(first_row, first_row + len(picked_ND))
            yield tally.usable_rows(picked_ND, partial(_place, metric_names, first_row, columns), lines)
            first_row += len(rows_ND)
            rows_ND = next(self._blocks, rows_ND[:0])

    def _read(self, source: Source, limits: DataConfig, spill_dir: str | None) -> Iterator[Floats]:
        with tempfile.SpooledTemporaryFile(MAX_SPOOLED_BYTES, dir=spill_dir) as file:
            while block := source.read(BLOCK_BYTES):
                file.write(block)
            _check_end(file)
            with self._errors():
                table = self._parquet.ParquetFile(file, pre_buffer=False, page_checksum_verification=True)
                schema = table.schema_arrow
            self._names = [printable(name.strip()) or f"column_{index}" for index, name in enumerate(schema.names)]
            check_names(self._names, limits)
            _check_sizes(table.metadata, limits)
            self._numeric = [index for index, type_ in enumerate(schema.types) if self._is_number(type_)]
            if not self._numeric:  # which columns there are is all that is asked for
                yield np.empty((table.metadata.num_rows, 0))
                return
            num_rows = max(SAMPLE_ROWS, BLOCK_BYTES // (8 * len(self._numeric)))
            names = [schema.names[index] for index in self._numeric]
            with self._errors():
                for batch in table.iter_batches(batch_size=num_rows, columns=names, use_threads=False):
                    source.read(0)  # reads nothing, since all was read, but says that we are alive
                    yield np.stack([self._as_float64(batch.column(name)) for name in names], axis=1)

    def _is_number(self, type_: Any) -> bool:
        types = self._arrow.types
        if types.is_dictionary(type_):
            type_ = type_.value_type
        return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_))

    def _as_float64(self, array: Any) -> Floats:
        """Nulls as NaN. An integer that float64 does not have becomes the nearest."""
        if self._arrow.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        cast = array.cast(self._arrow.float64(), safe=False)
        numbers: Floats = cast.to_numpy(zero_copy_only=False)
        return numbers

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """What pyarrow finds wrong is the file's fault; an OSError with a number is the disk's."""
        try:
            yield
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            first_line = str(error).partition("\n")[0]
            raise DataError(
                "malformed", f"the Parquet file can not be read: {first_line:.200}", remedy="write it or copy it again"
            ) from error


def _library(name: str) -> tuple[Any, Any]:
    try:
        import pyarrow as pa  # noqa: PLC0415  (it is optional)
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        # Not the machine's fault, which would hold up every other file until somebody installs a library for this one.
        raise DataError(
            "unsupported_format",
            f"{name} is a Parquet file, and the worker's interpreter can not load pyarrow: {error}",
            remedy="install pyarrow for the interpreter that worker.python names and requeue the job, or write CSV",
        ) from error
    return pa, pq


def _check_end(file: IO[bytes]) -> None:
    """A Parquet file ends as it begins."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(MAGIC)))
    end = file.read()
    file.seek(0)
    if end == ENCRYPTED_MAGIC:
        raise DataError("unsupported_format", "the Parquet file is encrypted", remedy="write it without encryption")
    if end != MAGIC or size < 3 * len(MAGIC):
        raise DataError("truncated", "the Parquet file has no end", remedy="the copy was cut short: copy it again")


def _check_sizes(metadata: Any, limits: DataConfig) -> None:
    if metadata.num_rows == 0:
        raise DataError("no_rows", "the Parquet file has no rows", remedy="write rows of numbers")
    sizes = [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]
    if sum(sizes) > limits.max_uncompressed_bytes:
        raise DataError(
            "too_large",
            f"{sum(sizes):,} bytes unpacked; {limits.max_uncompressed_bytes:,} are allowed",
            remedy="split it, or raise data.max_uncompressed_bytes",
        )
    if max(sizes) > MAX_GROUP_BYTES:
        raise DataError(
            "too_large",
            f"a row group has {max(sizes):,} bytes unpacked; {MAX_GROUP_BYTES:,} are allowed",
            remedy="write row groups of fewer rows",
        )


def _place(names: Sequence[str], first_row: int, columns: list[int], row: int, metric: int) -> tuple[int, int, str]:
    return first_row + row, columns[metric] + 1, names[metric]
