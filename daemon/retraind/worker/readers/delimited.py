"""Delimited text to rows of float64: CSV and its kin with any of four delimiters, decimal point or comma.

A block of lines is parsed at once by pandas' C parser when a vectorised count says that each line has the right number
of fields; whatever that parser does not take, and blocks with quotes, goes cell by cell with the same result. Never
lets pandas judge: it pads, shifts and renames. Raises DataError malformed, encoding, no_rows.
"""

# N rows of a block, D metrics
# ruff: noqa: N806  (arrays carry their shape)

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.readers.columns import Column, clean_names
from retraind.worker.readers.dialect import Dialect, detect
from retraind.worker.readers.layout import columns_changed
from retraind.worker.readers.lines import LineBlock, cut_lines
from retraind.worker.readers.numbers import MISSING, kind_of, reason_against, without_unit
from retraind.worker.readers.records import RecordSplitter
from retraind.worker.readers.source import Source
from retraind.worker.readers.tally import Tally

# Parser calls cost a millisecond each; larger blocks gain nothing and take memory.
BLOCK_BYTES = 4 * 2**20
# Lines that are parsed cell by cell around one bad cell, and into how many parts a block is split to find it.
CELLWISE_LINES = 64
SPLIT = 16
# Every spelling that the C parser may take as missing by itself; other cases of the letters go cell by cell.
NA_VALUES = sorted(
    {*MISSING, *(text.upper() for text in MISSING), "NaN", "-NaN", "Null", "None", "#n/a", "n/a", "[Not Supported]"}
)
# Before pandas 3 only this parser rounds correctly; from 3 on the default does, and the argument is deprecated.
EXACT = {"float_precision": "round_trip"} if int(pd.__version__.split(".")[0]) < 3 else {}
DECIMAL_COMMA_TO_POINT = bytes.maketrans(b",", b".")

Floats = NDArray[np.float64]


class DelimitedReader:
    """Reads one file of delimited text. `columns` are known at once, from the first block."""

    format = "csv"

    def __init__(self, source: Source, limits: DataConfig) -> None:
        # The first block must hold the header and the first row, however long they may be.
        block_bytes = max(BLOCK_BYTES, 2 * limits.max_line_bytes)
        self._blocks = cut_lines(source, block_bytes, limits.max_line_bytes)
        self._dialect = _detect(self._blocks, limits)
        self._splitter = RecordSplitter(self._dialect.delimiter, limits.max_line_bytes)

    @property
    def columns(self) -> list[Column]:
        return self._dialect.columns

    def rows(self, metric_names: Sequence[str], tally: Tally) -> Iterator[Floats]:
        """Yields float64 arrays of shape (N, D), one a block, of the rows in which a metric has a value.

        Columns stand in the order of `metric_names`; NaN is a missing value. Rows left out are told to the tally.
        """
        positions = {column.name: index for index, column in enumerate(self.columns)}
        chosen = [positions[name] for name in metric_names]
        label = None if tally.label is None else positions[tally.label]
        parser = _BlockParser(self._dialect, self._splitter, sorted(chosen), tally, label)
        order = np.argsort(np.argsort(chosen))
        num_lines = 0
        further = map(self._dialect.layout.rows_of, self._blocks)
        for block in chain([self._dialect.rows], further):
            num_lines = block.first_line + len(block.ends) - 1
            rows_ND = parser.parse(block)
            yield rows_ND if chosen == sorted(chosen) else rows_ND[:, order]
        self._splitter.finish(num_lines)


def _detect(blocks: Iterator[LineBlock], limits: DataConfig) -> Dialect:
    """The dialect by the first block that is not blank."""
    for block in blocks:
        if dialect := detect(block, limits.max_line_bytes):
            return dialect
    raise DataError("no_rows", "the file holds blank lines only", remedy="write rows of numbers")


@dataclass(frozen=True)
class _Lines:
    """Lines of the right width and their numbers in the file."""

    data: bytes
    starts: NDArray[np.intp]
    ends: NDArray[np.intp]
    numbers: NDArray[np.intp]

    def cells(self, index: int, delimiter: str, limit: int = -1) -> list[str]:
        line = self.data[self.starts[index] : self.ends[index]]
        return line.decode("utf-8", "surrogateescape").split(delimiter, limit)


class _BlockParser:
    """Blocks of one file to rows of the chosen columns, which are ascending positions in the file."""

    def __init__(
        self, dialect: Dialect, splitter: RecordSplitter, chosen: list[int], tally: Tally, label: int | None
    ) -> None:
        self._delimiter = dialect.delimiter
        self._width = dialect.width
        self._decimal = dialect.decimal
        self._splitter = splitter
        self._chosen = chosen
        self._column_numbers = [index + 1 for index in chosen]
        units = [dialect.units[index] for index in chosen]
        self._units = units if any(units) else []
        self._names = [column.name for column in dialect.columns] if dialect.has_header else []
        self._first_line = dialect.rows.first_line
        self._tally = tally
        self._label = label
        self._number_row = self._delimiter.join(["0.5"] * self._width).encode() + b"\n"

    def parse(self, block: LineBlock) -> Floats:
        """The rows of a block, shape (N, D)."""
        data = block.data
        needs_cells = self._units or self._decimal.needs_cells(data)
        if b'"' in data or b"\r" in data or self._splitter.pending or needs_cells:
            return self._by_records(block)
        if not data:
            return self._stacked([])
        lines = self._lines_of_width(block)
        return self._range(lines, 0, len(lines.ends)) if len(lines.ends) else self._stacked([])

    def _lines_of_width(self, block: LineBlock) -> _Lines:
        """Leaves out blank lines, and ragged ones, which are counted."""
        bytes_ = np.frombuffer(block.data, np.uint8)
        delimiters = np.flatnonzero(bytes_ == ord(self._delimiter))
        widths = np.diff(np.searchsorted(delimiters, block.ends), prepend=0) + 1
        starts = block.starts
        right = (widths == self._width) & (block.ends > starts)
        for index in np.flatnonzero(~right):
            if (line := block.line(int(index))).strip():
                self._tally.drop("ragged", block.first_line + int(index), text=line)
        numbers = block.first_line + np.arange(len(starts))
        return _Lines(block.data, starts[right], block.ends[right], numbers[right])

    def _range(self, lines: _Lines, start: int, stop: int) -> Floats:
        """Lines start..stop by the C parser; where it fails, in smaller parts, and in the end cell by cell."""
        parsed_ND = self._by_pandas(lines, start, stop)
        if parsed_ND is not None:
            if (label := self._label) is not None:
                for index in range(start, stop):
                    cell = lines.cells(index, self._delimiter, label + 1)[label]
                    self._tally.labelled(int(lines.numbers[index]), cell)
            numbers: list[int] = lines.numbers[start:stop].tolist()
            return self._tally.usable_rows(parsed_ND, partial(self._place, lines, start), numbers)
        if stop - start <= CELLWISE_LINES:
            rows = [self._row(lines.cells(i, self._delimiter), int(lines.numbers[i])) for i in range(start, stop)]
            return self._judged(rows, lines.numbers[start:stop].tolist())
        bounds = np.linspace(start, stop, SPLIT + 1).astype(int).tolist()
        return np.concatenate([self._range(lines, a, b) for a, b in pairwise(bounds)])

    def _by_pandas(self, lines: _Lines, start: int, stop: int) -> Floats | None:
        """All lines at once, or None when a cell is neither a number nor missing."""
        data = _joined(lines, start, stop)
        if self._decimal.mark == ",":
            data = data.translate(DECIMAL_COMMA_TO_POINT)
        # A column of nothing but true and false would be taken as 1 and 0: a last row of numbers keeps it from that.
        data += self._number_row
        try:
            frame = pd.read_csv(
                io.BytesIO(data),
                sep=self._delimiter,
                header=None,
                index_col=False,
                dtype=np.float64,
                usecols=self._chosen,
                keep_default_na=False,
                na_values=NA_VALUES,
                quoting=csv.QUOTE_NONE,
                low_memory=False,
                **EXACT,
            )
        except ValueError:  # a ParserError is one too
            return None
        return frame.to_numpy()[:-1] if len(frame) == stop - start + 1 else None

    def _place(self, lines: _Lines, start: int, row: int, metric: int) -> tuple[int, int, str]:
        position = self._chosen[metric]
        cell = lines.cells(start + row, self._delimiter)[position]
        return int(lines.numbers[start + row]), position + 1, cell

    def _by_records(self, block: LineBlock) -> Floats:
        """Quotes, and what may decide the decimal mark: record by record."""
        rows: list[list[float] | None] = []
        numbers = []
        for record in self._splitter.split(block):
            if len(record.cells) != self._width:
                self._tally.drop("ragged", record.line, text=self._delimiter.join(record.cells))
            else:
                rows.append(self._row(record.cells, record.line))
                numbers.append(record.line)
        return self._judged(rows, numbers)

    def _judged(self, rows: Sequence[list[float] | None], numbers: Sequence[int]) -> Floats:
        """Rows that went cell by cell, by the tally; None is one that it was told of."""
        kept = [(row, number) for row, number in zip(rows, numbers, strict=True) if row is not None]
        lines = [number for _, number in kept]
        rows_ND = self._stacked([row for row, _ in kept])
        return self._tally.usable_rows(rows_ND, lambda row, _: (lines[row], None, ""), lines)

    def _row(self, cells: list[str], line: int) -> list[float] | None:
        """The metrics of one row, not all of them missing, or None after telling the tally why not."""
        shown = chosen = [cells[index] for index in self._chosen]
        if self._units:
            chosen = [without_unit(cell, unit) for cell, unit in zip(chosen, self._units, strict=True)]
        if self._label is not None:
            self._tally.labelled(line, cells[self._label])
        if (numbers := self._decimal.numbers_of(chosen, line, self._column_numbers)) is not None:
            return numbers
        if self._width == 1 and not cells[0].strip():
            return None  # a blank line is no row
        texts = [self._decimal.pointed(cell) for cell in chosen]
        reasons = [reason_against(text) for text in texts]
        # Text in place of a number is a fault of the row; as long as there is none, one value is enough.
        if "not_a_number" not in reasons and None in reasons:
            return [_value(text, reason) for text, reason in zip(texts, reasons, strict=True)]
        if self._names and line > self._first_line and self._is_other_header(cells, shown):
            raise columns_changed(line)
        index = reasons.index("not_a_number") if "not_a_number" in reasons else 0
        self._tally.drop(reasons[index] or "", line, self._column_numbers[index], shown[index])
        return None

    def _is_other_header(self, cells: list[str], chosen: list[str]) -> bool:
        """Whether a row holds names instead of numbers, as where files of different columns were joined.

        All metrics are text, and no two the same or some cell is its column's name. The file's own header once more
        only costs a row, and so does a row of units directly below it.
        """
        if any(kind_of(cell, self._delimiter) not in {"word", "digits"} for cell in chosen):
            return False
        names = clean_names(cells)
        is_distinct = len({cell.strip().casefold() for cell in chosen}) == len(chosen) > 1
        has_own = any(
            a.casefold() == b.casefold() and cell.strip() for a, b, cell in zip(names, self._names, cells, strict=True)
        )
        return names != self._names and (is_distinct or has_own)

    def _stacked(self, rows: list[list[float]]) -> Floats:
        return np.array(rows, dtype=np.float64).reshape(-1, len(self._chosen))


def _value(text: str, reason: str | None) -> float:
    return float(text) if reason is None else math.nan if reason == "missing" else math.inf


def _joined(lines: _Lines, start: int, stop: int) -> bytes:
    """The lines as one text; without a copy per line when none was left out between them."""
    begin, end = int(lines.starts[start]), int(lines.ends[stop - 1]) + 1
    if lines.numbers[stop - 1] - lines.numbers[start] == stop - start - 1:
        return lines.data[begin:end]
    return b"".join(lines.data[lines.starts[i] : lines.ends[i] + 1] for i in range(start, stop))
