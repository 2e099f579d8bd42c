"""Content bytes cut into blocks of whole lines, so that each block can be parsed at once and memory stays bounded.

Owns line ends (LF, CRLF, CR), the byte order mark and the tail. Never looks into a line beyond that. Raises DataError
malformed for a line over the limit, found in bounded memory even when the line has no end, and for NUL bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retraind.errors import DataError

UTF8_BOM = b"\xef\xbb\xbf"
# Ctrl-Z ends a text file under CP/M and DOS; some loggers still write it.
CTRL_Z = b"\x1a"
# What is known of each line takes more memory than a short line itself: a block has no more of them than this.
MAX_BLOCK_LINES = 2**17


class Content(Protocol):
    """Where text comes from: `size` bytes a time, fewer only at its end."""

    def read(self, size: int) -> bytes: ...


@dataclass(frozen=True)
class LineBlock:
    """Whole lines, each with LF at its end. `ends` are the positions of the LFs, `first_line` counts from 1.

    `is_cut` tells that the file ends here without a line end: the last line may be incomplete.
    """

    data: bytes
    ends: NDArray[np.intp]
    first_line: int
    is_cut: bool = False

    @property
    def starts(self) -> NDArray[np.intp]:
        return np.concatenate(([0], self.ends + 1))[:-1]

    def line(self, index: int) -> bytes:
        """One line without its end."""
        start = self.ends[index - 1] + 1 if index else 0
        return self.data[start : self.ends[index]]

    def tail(self, index: int) -> "LineBlock":
        """The lines from `index` on."""
        start = int(self.ends[index - 1]) + 1 if index else 0
        return LineBlock(self.data[start:], self.ends[index:] - start, self.first_line + index, self.is_cut)

    def parts(self) -> Iterator["LineBlock"]:
        """Itself, or the same lines in blocks of at most MAX_BLOCK_LINES."""
        num_lines = len(self.ends)
        if num_lines <= MAX_BLOCK_LINES:
            yield self
            return
        for first in range(0, num_lines, MAX_BLOCK_LINES):
            stop = min(first + MAX_BLOCK_LINES, num_lines)
            begin = int(self.ends[first - 1]) + 1 if first else 0
            data = self.data[begin : int(self.ends[stop - 1]) + 1]
            yield LineBlock(data, self.ends[first:stop] - begin, self.first_line + first)


def cut_lines(source: Content, block_bytes: int, max_line_bytes: int) -> Iterator[LineBlock]:
    """The content as blocks of about `block_bytes` and MAX_BLOCK_LINES, or of one line where a line is longer."""
    line_number, carry, newline = 1, b"", b""
    while True:
        chunk = source.read(block_bytes)
        newline = newline or _newline_of(chunk)
        carry = carry + chunk if carry else chunk.removeprefix(UTF8_BOM) if line_number == 1 else chunk
        if not chunk:
            break
        head, end, rest = carry.rpartition(newline)
        if len(rest) > max_line_bytes:
            raise _too_long(line_number + head.count(newline) + len(end), len(rest), max_line_bytes)
        if end:
            block = _block(head + end, line_number, newline, max_line_bytes)
            line_number += len(block.ends)
            yield from block.parts()
        carry = rest
    last = carry.rstrip(CTRL_Z)
    if last.strip():
        yield _block(last + newline, line_number, newline, max_line_bytes, is_cut=True)


def _newline_of(chunk: bytes) -> bytes:
    """CR alone ends lines only in files without any LF, as old Macs wrote them."""
    return b"\r" if b"\r" in chunk and b"\n" not in chunk else b"\n"


def _block(data: bytes, first_line: int, newline: bytes, max_line_bytes: int, *, is_cut: bool = False) -> LineBlock:
    if b"\r" in data:  # a copy of the block, and only where there are CRs
        data = data.replace(b"\r", b"\n") if newline == b"\r" else data.replace(b"\r\n", b"\n")
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    lengths = np.diff(ends, prepend=-1) - 1
    longest = int(lengths.argmax())
    if lengths[longest] > max_line_bytes:
        raise _too_long(first_line + longest, int(lengths[longest]), max_line_bytes)
    if (position := data.find(b"\0")) >= 0:
        line = int(np.searchsorted(ends, position))
        raise DataError(
            "malformed",
            "there is a NUL byte in the text",
            line=first_line + line,
            column=position - int(ends[line - 1] if line else -1),
            remedy="the file was damaged, or written over a disk that was full: write it again",
        )
    return LineBlock(data, ends, first_line, is_cut)


def _too_long(line: int, length: int, limit: int) -> DataError:
    return DataError(
        "malformed",
        f"the line has {length:,} bytes or more; {limit:,} are allowed",
        line=line,
        remedy="end each row with a line feed, or raise data.max_line_bytes",
    )


def numbered_lines(source: Content, block_bytes: int, max_line_bytes: int) -> Iterator[tuple[str, int, bool]]:
    """Each line without blanks around it, its number, and whether the file ends in it: it may go on elsewhere."""
    for block in cut_lines(source, block_bytes, max_line_bytes):
        lines = block.data.decode("utf-8", "surrogateescape").split("\n")[:-1]
        last = block.first_line + len(lines) - 1
        for number, line in enumerate(lines, block.first_line):
            yield line.strip(" \t\r"), number, block.is_cut and number == last
