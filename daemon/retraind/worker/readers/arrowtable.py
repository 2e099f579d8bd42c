"""Tables of typed columns to rows of float64, by pyarrow where the worker's interpreter has it (door of pyarrow).

Owns what a column's type means, in each format that pyarrow reads: integers, floats and decimals are numbers, also
behind a dictionary; a null is a missing cell; times say when a row was; text, true and false, lists and structures are
listed and not used. Raises ReaderMissing where pyarrow is missing, DataError malformed and no_rows.
"""

# N rows of a block, D columns of numbers
# ruff: noqa: N803, N806  (arrays carry their shape)

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retraind.config import DataConfig
from retraind.errors import DataError, ReaderMissing
from retraind.printable import printable
from retraind.worker.readers.columns import SAMPLE_ROWS, Column, check_names
from retraind.worker.readers.source import Source
from retraind.worker.readers.tally import Tally

# Beside this pyarrow holds a page of each column, of 1 MiB where the writer did not say otherwise.
BLOCK_BYTES = 2**20
# pyarrow holds a group of rows while it is read; writers make groups of a tenth of this.
MAX_GROUP_BYTES = 2**30

Floats = NDArray[np.float64]


class ArrowTableReader:
    """Reads one file. `columns` are those of its schema; what a structure holds inside is none."""

    format = ""
    what = ""  # in words for messages

    def __init__(self, source: Source, limits: DataConfig, spill_dir: Path | None) -> None:
        self.arrow = library(
            f"{source.name} is an {self.what}, and the worker's interpreter",
            "install pyarrow for the interpreter that worker.python names, from Debian where it has "
            "python3-pyarrow, or by pip install 'retraind[arrow]': the file is kept and read then; or write CSV",
        )
        parts = self.parts(source, spill_dir)
        schema = next(parts)
        with self.errors():
            names = schema.names  # not UTF-8 in a damaged file
        self._names = [printable(name.strip()) or f"column_{index}" for index, name in enumerate(names)]
        check_names(self._names, limits)
        times = self.arrow.types.is_timestamp
        self._times = {index for index, type_ in enumerate(schema.types) if times(type_)}
        self._numeric = [
            index for index, type_ in enumerate(schema.types) if index in self._times or self._is_number(type_)
        ]
        self.numeric_names = [names[index] for index in self._numeric]
        self._blocks = self._stacked(parts, source)
        self._first_ND = self._sample()
        is_filled = dict(zip(self._numeric, np.any(~np.isnan(self._first_ND), axis=0).tolist(), strict=True))
        kinds = {None: "text", True: "number", False: "empty"}
        self.columns = [
            Column(name, "time" if index in self._times else kinds[is_filled.get(index)])
            for index, name in enumerate(self._names)
        ]

    def parts(self, source: Source, spill_dir: Path | None) -> Iterator[Any]:
        """The schema; then, once `numeric_names` are known from it, batches of rows that have at least those."""
        raise NotImplementedError

    def rows(self, metric_names: Sequence[str], tally: Tally) -> Iterator[Floats]:
        """Yields float64 arrays of shape (N, D), as DelimitedReader.rows does; a problem's line is its row."""
        columns = [self._names.index(name) for name in metric_names]
        chosen = [self._numeric.index(column) for column in columns]
        first_row, first_ND = 1, self._first_ND
        del self._first_ND
        for rows_ND in chain([first_ND], self._blocks):
            picked_ND = rows_ND[:, chosen]
            lines = range(first_row, first_row + len(picked_ND))
            if tally.label is not None:
                self._tell_times(rows_ND, lines, tally)
            yield tally.usable_rows(picked_ND, partial(_place, metric_names, first_row, columns), lines)
            first_row += len(rows_ND)

    def _tell_times(self, rows_ND: Floats, lines: range, tally: Tally) -> None:
        """Of the column `label`, if it is one of numbers or times."""
        column = self._names.index(tally.label or "")
        if column not in self._numeric:
            return
        values_N = rows_ND[:, self._numeric.index(column)]
        if column in self._times:
            tally.stamped(lines, np.nan_to_num(values_N).astype(np.int64))
            return
        for line, value in zip(lines, values_N.tolist(), strict=True):
            tally.labelled(line, f"{value:.17g}")

    def _sample(self) -> Floats:
        """The first blocks, as many as it takes to tell which columns are empty."""
        blocks: list[Floats] = []
        while sum(map(len, blocks)) < SAMPLE_ROWS and (block := next(self._blocks, None)) is not None:
            blocks.append(block)
        if not blocks:
            raise DataError("no_rows", f"the {self.what} has no rows", remedy="write rows of numbers")
        return np.concatenate(blocks)

    def _stacked(self, batches: Iterator[Any], source: Source) -> Iterator[Floats]:
        num_rows = max(SAMPLE_ROWS, BLOCK_BYTES // (8 * max(1, len(self._numeric))))
        for batch in batches:
            for start in range(0, batch.num_rows, num_rows):
                source.read(0)  # may read nothing, since all was read, but says that we are alive
                part = batch.slice(start, num_rows)
                with self.errors():
                    columns = [self._as_float64(part.column(name)) for name in self.numeric_names]
                yield np.stack(columns, axis=1) if columns else np.empty((part.num_rows, 0))

    def _is_number(self, type_: Any) -> bool:
        types = self.arrow.types
        if types.is_dictionary(type_):
            type_ = type_.value_type
        return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_decimal(type_))

    def _as_float64(self, array: Any) -> Floats:
        """Nulls as NaN, times as nanoseconds since 1970. An integer that float64 does not have becomes the nearest."""
        if self.arrow.types.is_timestamp(array.type):
            array = array.cast(self.arrow.timestamp("ns", array.type.tz), safe=False).cast(self.arrow.int64())
        if self.arrow.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        cast = array.cast(self.arrow.float64(), safe=False)
        numbers: Floats = cast.to_numpy(zero_copy_only=False)
        return numbers

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What pyarrow finds wrong is the file's fault; an OSError with a number is the disk's."""
        try:
            yield
        except (self.arrow.ArrowException, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            first_line = str(error).partition("\n")[0]
            raise DataError(
                "malformed", f"the {self.what} can not be read: {first_line:.200}", remedy="write it or copy it again"
            ) from error


def library(who: str, remedy: str) -> Any:
    """The library with the parts that are used. Raises ReaderMissing, which says that `who` can not load it."""
    try:
        import pyarrow as pa  # noqa: PLC0415  (it is optional)
        import pyarrow.ipc  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise ReaderMissing("no_reader", f"{who} can not load pyarrow: {error}", remedy=remedy) from error
    return pa


def _place(names: Sequence[str], first_row: int, columns: list[int], row: int, metric: int) -> tuple[int, int, str]:
    return first_row + row, columns[metric] + 1, names[metric]
