"""Lines to records: fields by RFC 4180, where a quoted field may hold delimiters, doubled quotes and line ends.

Owns the state between blocks when a quoted field is open. A quote that is not closed, or closed in the middle of a
field, is a DataError malformed at the line where the record begins: reading on would swallow good rows as one text.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass

from retraind.errors import DataError
from retraind.worker.readers.lines import LineBlock


@dataclass(frozen=True)
class Record:
    """One record: its fields, the line where it begins and the line where it ends, counted from 1."""

    cells: list[str]
    line: int
    last_line: int

    @property
    def is_blank(self) -> bool:
        return not self.cells or (len(self.cells) == 1 and not self.cells[0].strip())


class RecordSplitter:
    """Splits blocks of one file in order; `pending` holds the lines of a record that goes on in the next block."""

    def __init__(self, delimiter: str, max_record_bytes: int) -> None:
        self._delimiter = delimiter
        self._max_record_bytes = max_record_bytes
        self.pending: list[str] = []

    def split(self, block: LineBlock) -> Iterator[Record]:
        """The records that end in this block, blank ones left out."""
        first_line = block.first_line - len(self.pending)
        # Bytes that are not UTF-8 are carried along: they may stand in a column that is not used.
        text = block.data.decode("utf-8", "surrogateescape")
        lines = self.pending + list(io.StringIO(text, newline="\n"))
        self.pending = []
        rows = csv.reader(lines, delimiter=self._delimiter, strict=True, skipinitialspace=True)
        num_done = 0
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end" not in str(error):
                    raise _malformed(f"the record can not be read: {error}", first_line + num_done) from error
                self._keep(lines[num_done:], first_line + num_done)
                return
            record = Record(cells, first_line + num_done, first_line + rows.line_num - 1)
            num_done = rows.line_num
            if not record.is_blank:
                yield record

    def finish(self, num_lines: int) -> None:
        """Raises DataError malformed when the file of `num_lines` lines ends within a record."""
        if self.pending:
            raise _malformed("a quote is opened here and never closed", num_lines - len(self.pending) + 1)

    def _keep(self, lines: list[str], line: int) -> None:
        if sum(map(len, lines)) > self._max_record_bytes:
            raise _malformed(f"a quote is opened here and not closed within {self._max_record_bytes:,} bytes", line)
        self.pending = lines


def _malformed(message: str, line: int) -> DataError:
    return DataError("malformed", message, line=line, remedy='double a quote that belongs to the text: ""')
