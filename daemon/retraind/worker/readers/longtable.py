"""Long tables to rows: delimited text with one sample a line, in three columns for series, time and value.

Owns how such a table is known: by a header of exactly these three, one name of SERIES_NAMES, a time and one name of
VALUE_NAMES each, above series that are text. A name of OWNERS does for the series where the first lines have values of
two owners: one series of all hosts would be a model of none. Any other table is wide, as `delimited` reads it; but one
that has further columns of text beside these three is refused, for its values belong to series that nobody named.
Raises DataError malformed, ambiguous_columns, no_rows.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.readers.columns import TIME_NAMES, kind_of_column
from retraind.worker.readers.dialect import DELIMITERS, SEP_LINE
from retraind.worker.readers.lines import cut_lines
from retraind.worker.readers.numbers import DecimalMark, kind_of, reason_against
from retraind.worker.readers.pivot import SeriesReader
from retraind.worker.readers.records import Record, RecordSplitter
from retraind.worker.readers.samples import Samples
from retraind.worker.readers.source import Source
from retraind.worker.readers.timestamps import Clock

BLOCK_BYTES = 2**20
SERIES_NAMES = frozenset({"series", "metric", "name", "id", "series_name", "metric_name"})
VALUE_NAMES = frozenset({"value"})
TIMES = re.compile("|".join([*sorted(TIME_NAMES), "timestamp_.+"]))
OWNERS = re.compile(r"(?:.+[_.])?(?:host|hostname|instance|device|node|server|machine|pod|container|ip|id|name)")
WIDTH = 3
REMEDY = "write the columns series, time and value; times as ISO 8601 or a number since 1970"


@dataclass(frozen=True)
class Layout:
    """Where in a long table things stand. `num_heads` records are no data."""

    delimiter: str
    num_heads: int
    series: int
    time: int
    value: int


def layout_of(lines: list[str]) -> Layout | None:
    """The layout of the long table that begins with these lines; None for anything else."""
    num_seps = int(bool(SEP_LINE.fullmatch(lines[0].encode("utf-8", "surrogateescape"))))
    for delimiter in DELIMITERS if len(lines) > num_seps + 1 else ():
        try:
            names, *records = csv.reader(lines[num_seps:], delimiter=delimiter, strict=True, skipinitialspace=True)
        except csv.Error:
            continue
        if (roles := _roles([name.strip().casefold() for name in names])) is None:
            continue
        records = [record for record in records if len(record) == len(names)]
        kinds = [_kind([record[column] for record in records], delimiter) for column in range(len(names))]
        others = [column for column in range(len(names)) if column not in roles]
        is_owner = names[roles[0]].strip().casefold() not in SERIES_NAMES
        if is_owner and len({record[roles[0]] for record in records}) < 2:
            return None
        if kinds[roles[0]] != "text" or any(kinds[column] != "text" for column in others):
            return None
        if others:
            raise DataError(
                "ambiguous_columns",
                f"one sample a line, but {names[others[0]]!r:.60} stands beside series, time and value",
                line=num_seps + 1,
                column=others[0] + 1,
                remedy="write what tells the series apart into one column, and leave out the others",
            )
        return Layout(delimiter, num_seps + 1, *roles)
    return None


def _roles(names: list[str]) -> tuple[int, int, int] | None:
    """The columns of series, time and value, if there is one of each."""
    series = [i for i, name in enumerate(names) if name in SERIES_NAMES]
    times = [i for i, name in enumerate(names) if TIMES.fullmatch(name)]
    values = [i for i, name in enumerate(names) if name in VALUE_NAMES]
    if not series and len(names) == WIDTH:
        series = [i for i, name in enumerate(names) if OWNERS.fullmatch(name)]
    if any(len(columns) != 1 for columns in (series, times, values)):
        return None
    return series[0], times[0], values[0]


def _kind(cells: list[str], delimiter: str) -> str:
    kinds = Counter(kind_of(cell, delimiter) for cell in cells)
    return kind_of_column(kinds["number"], kinds["word"] + kinds["digits"])


def read_long_table(source: Source, limits: DataConfig, layout: Layout) -> SeriesReader:
    """Reads all of it: which series there are is known at the end."""
    samples, clock, decimal = Samples(limits), Clock(), DecimalMark(layout.delimiter)
    for record in _records(source, limits, layout):
        cell, name = record.cells[layout.value], record.cells[layout.series].strip()
        if not name:
            raise _malformed("the series has no name", record.line, layout.series)
        try:
            instant = clock.instant(record.cells[layout.time].strip())
        except ValueError as error:
            raise _malformed(str(error), record.line, layout.time) from error
        numbers = decimal.numbers_of([cell], record.line, [layout.value + 1])
        reason = None if numbers else reason_against(decimal.pointed(cell))
        if reason == "not_a_number":
            samples.add_text(name, record.line)
        else:
            number = numbers[0] if numbers else float("nan" if reason == "missing" else "inf")
            samples.add(samples.code(name, record.line), instant, number, record.line)
    return SeriesReader("csv-long", source, samples)


def _records(source: Source, limits: DataConfig, layout: Layout) -> Iterator[Record]:
    """The records below the header. A last one of fewer fields, without a line end, was cut and is left out."""
    splitter, num_records, num_lines = RecordSplitter(layout.delimiter, limits.max_line_bytes), 0, 0
    for block in cut_lines(source, BLOCK_BYTES, limits.max_line_bytes):
        num_lines = block.first_line + len(block.ends) - 1
        for record in splitter.split(block):
            num_records += 1
            if num_records <= layout.num_heads:
                continue
            if len(record.cells) == WIDTH:
                yield record
            elif not (block.is_cut and record.last_line == num_lines):
                raise _malformed(f"the record has {len(record.cells):,} fields; 3 are expected", record.line, None)
    splitter.finish(num_lines)


def _malformed(message: str, line: int, column: int | None) -> DataError:
    return DataError("malformed", message, line=line, column=None if column is None else column + 1, remedy=REMEDY)
