"""What stands above the rows of a delimited file and between them, and is none: preambles, comments, repeated headers.

Three layouts are known, by the lines above the first row, of which there may be MAX_LINES_ABOVE:

* dstat, pcp-dstat and dool: one quoted field that ends in "CSV output"; then lines that begin with a quoted word and a
  colon (`"Host:",`), or blank ones; then two rows of quoted names. A group goes on to the right until the next one, and
  makes `group/name`; a name that is its group's or begins with it and a colon stays as it is.
* `sadf -d`: the header `# hostname;interval;timestamp;...`, where restarts of the machine may stand above it.
* any lines that begin with "#". The last one is the header if it has as many fields as the row below it, which has a
  number or a missing value; above names, and without a delimiter, it is a comment.

What goes on in the same layout further down (a run that was appended, a header that sadf repeats) is taken out. What
says that the columns change is refused: DataError malformed or, for what has to be exported in another way,
unsupported_format. Other text above a header is no layout, and is left to the dialect to refuse.
"""

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from retraind.errors import DataError
from retraind.worker.readers.lines import LineBlock
from retraind.worker.readers.numbers import reason_against
from retraind.worker.readers.records import Record

MAX_LINES_ABOVE = 64
COMMENT_MARK = b"#"
DSTAT_TITLE = re.compile(rb'"[^"]*CSV output"[, ]*', re.IGNORECASE)
DSTAT_PREAMBLE = re.compile(rb'"[A-Za-z]+:",.*')
QUOTED_ROW = re.compile(rb'(?:"[^"]*")?(?:,(?:"[^"]*")?)*')
SADF_HEADER = b"# hostname;interval;timestamp;"
# Restarts and comments of the record, which sadf writes between its rows with an interval of -1.
SADF_EVENT = re.compile(rb"[^;]*;-1;[^;]*;(?:LINUX-RESTART|COM\b).*")
SADF_REMEDY = "export all as JSON: sadf -j FILE -- -A; or a table of one record per time stamp: sadf -d FILE -- -u"
# The first words of tables that are made for a screen: the tool, and how to get a file from the same numbers.
SCREEN_TABLES = (
    (re.compile(rb"Linux \S+ \([^)]*\)\s+[0-9][-0-9/.]+.*"), "sar, mpstat, iostat or pidstat"),
    (re.compile(rb"procs[ -]+memory[ -].*"), "vmstat"),
)


@dataclass
class Layout:
    """What to do with the lines of one file. `num_lines` of the first block, from its first, stand above the rows.

    `header` has the names, and `comment` the text of one field that may hold them; without both the rows tell. `judge`
    gets each further line that begins with `mark`, none for None, and says whether it is to be taken out, or raises.
    Who finds that the comment is the header sets the mark.
    """

    num_lines: int = 0
    header: Record | None = None
    comment: Record | None = None
    delimiter: str = ""
    mark: bytes | None = None
    judge: Callable[[bytes, int], bool] = field(default=lambda _line, _number: False)

    def rows_of(self, block: LineBlock) -> LineBlock:
        """The block with blank lines for those that are no rows, so that lines keep their numbers."""
        if self.mark is None or not (block.data.startswith(self.mark) or b"\n" + self.mark in block.data):
            return block
        lines = block.data.split(b"\n")[:-1]
        for index, line in enumerate(lines):
            if line.startswith(self.mark) and self.judge(line.rstrip(), block.first_line + index):
                lines[index] = b""
        data = b"".join(line + b"\n" for line in lines)
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
        return LineBlock(data, ends, block.first_line, block.is_cut)


def layout_of(block: LineBlock) -> Layout:
    """The layout of the file that begins with this block, which holds a line that is not blank."""
    above = [block.line(index).rstrip() for index in range(min(MAX_LINES_ABOVE, len(block.ends)))]
    first = next((index for index, line in enumerate(above) if line), len(above))
    if first == len(above):
        return Layout()
    _refuse_screen_table(above[first], block.first_line + first)
    if DSTAT_TITLE.fullmatch(above[first]):
        return _dstat(above, first + 1, block.first_line)
    if header := _sadf_header(above):
        return _sadf(above[header - 1], block.first_line + header - 1)
    return _commented(above, first, block)


def columns_changed(line: int) -> DataError:
    """The error for names below the first rows that are not those above them."""
    return DataError(
        "malformed",
        "a header with other columns than before stands between the rows",
        line=line,
        remedy="drop one file for each set of columns",
    )


def _refuse_screen_table(line: bytes, number: int) -> None:
    for pattern, tools in SCREEN_TABLES:
        if pattern.fullmatch(line):
            raise DataError(
                "unsupported_format",
                f"this is a table for the screen, as {tools} writes it",
                line=number,
                remedy="record by sar -A -o FILE and export it by sadf -j FILE -- -A, or record by dool --output FILE",
            )


def _dstat(above: list[bytes], start: int, first_line: int) -> Layout:
    index = next(
        (i for i in range(start, len(above)) if above[i] and not DSTAT_PREAMBLE.fullmatch(above[i])), len(above)
    )
    rows = [_fields(line, ",") for line in above[index : index + 2] if QUOTED_ROW.fullmatch(line)]
    if len(rows) != 2 or len(rows[0]) != len(rows[1]):
        raise DataError(
            "malformed",
            "a file of dstat or dool has two header rows of quoted names of the same number",
            line=first_line + index,
            remedy="write it again with --output and without editing it",
        )
    names, lines = set(above[index : index + 2]), (first_line + index, first_line + index + 1)

    def judge(line: bytes, number: int) -> bool:
        if DSTAT_TITLE.fullmatch(line) or DSTAT_PREAMBLE.fullmatch(line) or line in names:
            return True
        if QUOTED_ROW.fullmatch(line):
            raise columns_changed(number)
        return False

    header = Record(_grouped(*rows), *lines)
    return Layout(index + 2, header, delimiter=",", mark=b'"', judge=judge)


def _grouped(groups: list[str], names: list[str]) -> list[str]:
    """Two rows of names as one."""
    joined, group = [], ""
    for own_group, name in zip(groups, names, strict=True):
        group = own_group.strip() or group
        stands_alone = not group or name == group or name.startswith(f"{group}:")
        joined.append(name if stands_alone else f"{group}/{name}")
    return joined


def _sadf_header(above: list[bytes]) -> int:
    """The number of the line with the header of sadf, counted from 1; 0 where there is none."""
    for number, line in enumerate(above, 1):
        if line.startswith(SADF_HEADER):
            return number
        if line and not SADF_EVENT.fullmatch(line):
            return 0
    return 0


def _sadf(header: bytes, number: int) -> Layout:
    """Only headers are taken out: restarts above and between them have no values, and are counted as such."""
    last_stamp: list[bytes] = []

    def judge(line: bytes, number: int) -> bool:
        if line == header:
            return True
        if line.startswith(b"#"):
            raise DataError(
                "unsupported_format",
                "the file has several tables of sadf with different columns",
                line=number,
                remedy=SADF_REMEDY,
            )
        stamp = line.split(b";", 3)[:3]
        if stamp == last_stamp and not SADF_EVENT.fullmatch(line):
            raise DataError(
                "unsupported_format",
                "sadf wrote several records for one time stamp, one a processor, device or interface",
                line=number,
                remedy=SADF_REMEDY,
            )
        last_stamp[:] = stamp if line else last_stamp
        return False

    names = [name.strip() for name in _fields(header[1:], ";")]
    return Layout(0, Record(names, number, number), delimiter=";", mark=b"", judge=judge)


def _commented(above: list[bytes], first: int, block: LineBlock) -> Layout:
    """Lines with "#" above the rows; whether the last one is the header is seen with the rows."""
    row = next((i for i in range(first, len(above)) if above[i] and not above[i].startswith(b"#")), 0)
    if row <= first:
        return Layout()
    last = next(i for i in range(row - 1, -1, -1) if above[i])
    header, number = above[last], block.first_line + last

    def judge(line: bytes, number: int) -> bool:
        if line == header:
            return True
        delimiter = max(b";\t|,", key=header.count).to_bytes()
        fields = line.split(delimiter)
        if len(fields) == header.count(delimiter) + 1 and not any(
            reason_against(_text(cell)) is None for cell in fields
        ):
            raise columns_changed(number)
        return False

    return Layout(row, comment=Record([_text(header.lstrip(b"# \t"))], number, number), judge=judge)


def _fields(line: bytes, delimiter: str) -> list[str]:
    return fields_of(_text(line), delimiter)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "surrogateescape")


def fields_of(text: str, delimiter: str) -> list[str]:
    """The fields of one line of names; what csv can not split, since it is too long, is one field."""
    try:
        return next(csv.reader([text], delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error:
        return [text]
