"""How a delimited file is written: delimiter, header or none, width. Decided from the first records, by content alone.

Never guesses by the file's name. The delimiter is the one that gives the most numeric cells, then the most lines of
equal width. What stands above the header is layout.py's. A column whose numbers have a unit has the one that most of
them have. Raises DataError encoding for a header that is not UTF-8, malformed where nothing can be split.
"""

import re
from collections import Counter
from dataclasses import dataclass

from retraind.errors import DataError
from retraind.worker.readers.columns import SAMPLE_ROWS, Column, clean_names, kind_of_column, position_names
from retraind.worker.readers.layout import COMMENT_MARK, Layout, fields_of, layout_of
from retraind.worker.readers.lines import LineBlock
from retraind.worker.readers.numbers import BLANKS, COMMA_NUMBER, DecimalMark, kind_of, split_unit
from retraind.worker.readers.producers import kinds_by_producer
from retraind.worker.readers.records import Record, RecordSplitter

# The comma comes last: in a draw it is more often a decimal comma than a delimiter.
DELIMITERS = (";", "\t", "|", ",")
# Enough to see which delimiter fits; the sample for the columns is larger.
SNIFF_ROWS = 100
TORN_NUMBERS = re.compile(r"[0-9]+[ \t]+[+-]?[0-9]+")
SEP_LINE = re.compile(rb'[ \t]*"?sep=([;,|\t])"?[ \t]*', re.IGNORECASE)


@dataclass(frozen=True)
class Dialect:
    """What the first block says about the file. `rows` are the lines of it that are rows; `units` has "" for none."""

    delimiter: str
    width: int
    has_header: bool
    rows: LineBlock
    layout: Layout
    columns: list[Column]
    units: list[str]
    decimal: DecimalMark


def detect(block: LineBlock, max_record_bytes: int) -> Dialect | None:
    """The dialect of the file that begins with this block; None when all its lines are blank."""
    sep_line = SEP_LINE.fullmatch(block.line(0))
    body = block.tail(1) if sep_line else block
    if not body.data.strip():
        return None
    layout = layout_of(body)
    body = layout.rows_of(body.tail(layout.num_lines))
    if not body.data.strip():
        raise _no_rows_below()
    delimiter = layout.delimiter or (sep_line[1].decode("latin-1") if sep_line else sniff_delimiter(body))
    records = _sample(body, delimiter, SAMPLE_ROWS + 1)
    if not records:
        records = [_first_record(body, delimiter, max_record_bytes)]
    header, data = layout.header, records
    if layout.comment and (header := _header_in_comment(layout.comment, records, delimiter)):
        layout.mark = COMMENT_MARK
        body = layout.rows_of(body)
    if not header and is_header(records, delimiter):
        header = records[0]
        data = records[1:] or _below(body, header, delimiter, max_record_bytes)
        body = body.tail(header.last_line - body.first_line + 1)
    width = len(header.cells) if header else Counter(len(r.cells) for r in records).most_common(1)[0][0]
    if header and all(len(record.cells) != width for record in data):
        raise _header_of_other_width(width, data[0])
    data = [record for record in data if len(record.cells) == width]
    _refuse_blank_separated(data, delimiter)
    names = _header_names(header) if header else position_names(width)
    decimal = DecimalMark(delimiter)
    for record in data:
        decimal.learn(record.cells, record.line, range(1, width + 1))
    columns, units = _columns(names, data, delimiter)
    return Dialect(delimiter, width, header is not None, body, layout, columns, units, decimal)


def _header_in_comment(comment: Record, records: list[Record], delimiter: str) -> Record | None:
    """The last line with "#" above the rows as a header; None for a comment.

    It is a comment if the line below it has words alone, and so is a header, or if it has one field. It is refused
    where it may be either: not as many fields as below, numbers among them, or words below that end with blanks.
    """
    names, cells = fields_of(comment.cells[0], delimiter), records[0].cells
    num_blank = next((n for n, cell in enumerate(reversed(cells)) if cell.strip(BLANKS)), len(cells))
    kinds = {kind_of(cell, delimiter) for cell in cells[: len(cells) - num_blank]}
    is_names = kinds <= {"word", "digits"}
    if len(names) < 2 <= len(cells) or (is_names and (not num_blank or len(names) != len(cells))):
        return None
    if is_names or len(names) != len(cells) or any(kind_of(name, delimiter) == "number" for name in names):
        raise DataError(
            "malformed",
            f"the line with '#' above the rows has {len(names):,} fields, the row below it {len(cells):,}; "
            "it may be a header or a comment",
            line=comment.line,
            remedy="write as many names as values, none of them a number, or take the line out",
        )
    return Record(names, comment.line, comment.last_line)


def sniff_delimiter(block: LineBlock) -> str:
    """The delimiter of a block; a comma where no line can be split."""
    scores = {delimiter: _score(_sample(block, delimiter, SNIFF_ROWS), delimiter) for delimiter in DELIMITERS}
    best = max(DELIMITERS, key=lambda delimiter: scores[delimiter])
    return best if any(scores[best]) else ","


def _score(records: list[Record], delimiter: str) -> tuple[float, float]:
    """Share of numbers in the text and share of records of the usual width; zeros for what does not split.

    A cell with other delimiters in it counts as all the pieces that they would make: a wrong delimiter finds numbers at
    both ends of a line, and leaves what is between them in one cell.
    """
    widths = Counter(len(record.cells) for record in records)
    width, count = widths.most_common(1)[0] if widths else (1, 0)
    if width == 1:
        return 0.0, 0.0
    num_numbers = num_pieces = 0
    for cell in (cell for record in records for cell in record.cells):
        kind, pieces = kind_of(cell, delimiter), _pieces(cell, delimiter)
        num_numbers += kind == "number" and pieces == 1
        num_pieces += pieces if kind != "missing" else 0
    return num_numbers / num_pieces if num_pieces else 0.0, count / len(records)


def _pieces(cell: str, delimiter: str) -> int:
    """Into how many fields the other delimiters would split a cell; a number with a decimal comma is one."""
    if delimiter != "," and COMMA_NUMBER.fullmatch(split_unit(cell)[0].strip(BLANKS)):
        return 1
    return 1 + sum(cell.count(other) for other in DELIMITERS if other != delimiter)


def is_header(records: list[Record], delimiter: str) -> bool:
    """Whether the first record names the columns.

    All cells numeric or missing: data. None numeric: a header. Mixed: a header if some cell is of another kind (word,
    text that begins with a digit, number) than the one below it, or if there is nothing below.
    """
    first = [kind_of(cell, delimiter) for cell in records[0].cells]
    if all(kind in {"number", "missing"} for kind in first):
        return False
    if "number" not in first or len(records) == 1:
        return True
    second = [kind_of(cell, delimiter) for cell in records[1].cells]
    return any(a != b and "missing" not in {a, b} for a, b in zip(first, second, strict=False))


def _sample(block: LineBlock, delimiter: str, num_records: int) -> list[Record]:
    """The first records, as far as they can be read: what is wrong further on is told when it is reached."""
    records: list[Record] = []
    num_lines = min(num_records, len(block.ends))
    head = LineBlock(block.data[: block.ends[num_lines - 1] + 1], block.ends[:num_lines], block.first_line)
    try:
        records.extend(RecordSplitter(delimiter, len(head.data)).split(head))
    except DataError:
        return records
    return records


def _first_record(block: LineBlock, delimiter: str, max_record_bytes: int) -> Record:
    """The first record where the sample has none. Raises DataError malformed if it does not end here, or no_rows."""
    splitter = RecordSplitter(delimiter, max_record_bytes)
    for record in splitter.split(block):
        return record
    splitter.finish(block.first_line + len(block.ends) - 1)
    raise DataError("no_rows", "all fields are blank", remedy="write rows of numbers")


def _below(body: LineBlock, header: Record, delimiter: str, max_record_bytes: int) -> list[Record]:
    """What stands below a header where the sample has nothing. Raises DataError no_rows if that is nothing at all."""
    rest = body.tail(header.last_line - body.first_line + 1)
    if not rest.data.strip():
        raise _no_rows_below()
    return [_first_record(rest, delimiter, max_record_bytes)]


def _no_rows_below() -> DataError:
    return DataError("no_rows", "there are no rows below the header", remedy="write rows of numbers below it")


def _header_of_other_width(width: int, row: Record) -> DataError:
    return DataError(
        "malformed",
        f"the header has {width:,} fields, but the rows below it have {len(row.cells):,}",
        line=row.line,
        remedy="write as many names as values, and no text above the header",
    )


def _header_names(record: Record) -> list[str]:
    for column, name in enumerate(record.cells, 1):
        if any("\udc80" <= character <= "\udcff" for character in name):
            raise DataError(
                "encoding",
                "a column name is not UTF-8",
                line=record.line,
                column=column,
                remedy="convert the file: iconv -f LATIN1 -t UTF-8",
            )
    return clean_names(record.cells)


def _columns(names: list[str], data: list[Record], delimiter: str) -> tuple[list[Column], list[str]]:
    columns, units = [], []
    known_kinds = kinds_by_producer(names, data)
    for index, name in enumerate(names):
        cells = [record.cells[index] for record in data]
        kinds = Counter(kind_of(cell, delimiter) for cell in cells)
        unit, num_numbers = "", kinds["number"]
        if num_numbers and any(split_unit(cell)[1] for cell in cells):
            counts = Counter(split_unit(cell)[1] for cell in cells if kind_of(cell, delimiter) == "number")
            [(unit, num_numbers)] = counts.most_common(1)
        num_others = kinds.total() - kinds["missing"] - num_numbers
        columns.append(Column(name, known_kinds.get(name) or kind_of_column(num_numbers, num_others)))
        units.append(unit)
        if delimiter == "," and kinds["digits"] and not kinds["number"]:
            _refuse_decimal_commas(cells, data, index + 1)
    return columns, units


def _refuse_blank_separated(data: list[Record], delimiter: str) -> None:
    """Numbers with a decimal comma between blanks, "0,24 0,00 0,79": all but the outer cells are as "24 0"."""
    if delimiter != "," or not data:
        return
    inner = [record.cells[1:-1] for record in data]
    num_torn = sum(bool(cells) and all(TORN_NUMBERS.fullmatch(cell) for cell in cells) for cells in inner)
    if num_torn > len(data) / 2:
        raise DataError(
            "malformed",
            "the fields are separated by blanks, and the numbers have a decimal comma",
            line=data[0].line,
            remedy="separate the fields by semicolons",
        )


def _refuse_decimal_commas(cells: list[str], data: list[Record], column: int) -> None:
    """A column of "1,5" between commas: a decimal comma or thousands, and nobody can tell which."""
    present = [cell.strip(BLANKS) for cell in cells if kind_of(cell, ",") != "missing"]
    if all(COMMA_NUMBER.fullmatch(cell) for cell in present):
        raise DataError(
            "malformed",
            f"{present[0]!r} has a decimal comma or a separator of thousands, in a file of comma separated fields",
            line=data[0].line,
            column=column,
            remedy="write numbers with a decimal point, or separate the fields by semicolons",
        )
