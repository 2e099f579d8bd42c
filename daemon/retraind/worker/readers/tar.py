"""A tar archive of files of one format as one file: its members in order of name, one after the other.

Owns which members are read and in which order. Nothing is extracted: the archive is copied to an unnamed temporary
file, since order of name is not the order of the archive, and the members are streamed out of it. Whatever is no plain
file refuses the archive, for it was not made of telemetry alone; hidden names, as desktops add them, are passed over.
Line numbers go on from one member to the next. Raises DataError unsupported_format, truncated, malformed, empty,
too_large, missing_columns, and what the reader of a member raises, with the member's name.
"""

# N rows of a block, D metrics
# ruff: noqa: N803  (arrays carry their shape)

import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.printable import printable
from retraind.worker.readers.columns import Column, match_metrics
from retraind.worker.readers.source import Source
from retraind.worker.readers.spill import copied
from retraind.worker.readers.tally import Tally

if TYPE_CHECKING:
    from retraind.worker.readers import Reader

MAGIC, MAGIC_AT = b"ustar", 257
BLOCK_BYTES = 4 * 2**20
MAX_ENTRIES = 10_000
# Long names and the headers of pax, which tarfile holds in memory.
MAX_HEADER_BYTES = 2**20
# What tarfile raises for an archive that is none, or lies.
DAMAGES = (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError, LookupError, TypeError)
REMEDY = "pack plain files of one format: tar czf FILE.tar.gz *.csv"

Floats = NDArray[np.float64]


def is_tar(head: bytes) -> bool:
    """Whether a file begins with a tar header, which text that has the word there is not: it has NULs."""
    return head[MAGIC_AT : MAGIC_AT + len(MAGIC)] == MAGIC and b"\0" in head[:MAGIC_AT]


class TarReader:
    """Reads one archive. `columns` are those of its first file; further columns of later ones are not used."""

    def __init__(
        self, source: Source, limits: DataConfig, spill_dir: Path | None, open_reader: Callable[[Source], "Reader"]
    ) -> None:
        self._limits, self._open_reader = limits, open_reader
        self._members = _unpacked(source, spill_dir)
        self._first_member = next(self._members)
        self._first = self._opened(self._first_member)
        self.format = f"{self._first.format}+tar"

    @property
    def columns(self) -> Sequence[Column]:
        return self._first.columns

    def rows(self, metric_names: Sequence[str], tally: Tally) -> Iterator[Floats]:
        """Yields the rows of each member, as its reader does. An archive is read once."""
        onward = _Onward(tally)
        for member in chain([self._first_member], self._members):
            reader = self._first if member is self._first_member else self._opened(member)
            with _named(member):
                if reader.format != self._first.format:
                    raise DataError(
                        "unsupported_format",
                        f"this is {reader.format}, the first file of the archive is {self._first.format}",
                        remedy=REMEDY,
                    )
                match_metrics(reader.columns, metric_names, self._limits, whose="the first file of the archive")
                if tally.label is not None and tally.label not in {column.name for column in reader.columns}:
                    raise DataError(
                        "missing_columns",
                        f"the column {tally.label} of the first file of the archive is missing",
                        remedy="give all files the same columns",
                    )
                onward.begin()
                yield from reader.rows(metric_names, onward)

    def _opened(self, member: "_Member") -> "Reader":
        with _named(member):
            if is_tar(member.peek(512)):
                raise DataError("unsupported_format", "this is an archive within an archive", remedy=REMEDY)
            return self._open_reader(member)


class _Member(Source):
    """One file of an archive, as a source of content. The digest and the descriptor are the archive's."""

    def __init__(self, archive: Source, file: IO[bytes], info: tarfile.TarInfo) -> None:
        self.name, self.compression, self.size = printable(info.name), "", info.size
        self._archive, self._file = archive, file
        self._position, self._end = info.offset_data, info.offset_data + info.size

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end of the member."""
        self._archive.read(0)  # reads nothing, since all was read, but says that we are alive
        self._file.seek(self._position)
        data = self._file.read(min(size, self._end - self._position))
        self._position += len(data)
        return data

    def peek(self, size: int) -> bytes:
        """The next bytes without taking them."""
        data = self.read(size)
        self._position -= len(data)
        return data

    def unpacks_to(self, num_bytes: int) -> None:
        """Counts for the archive: what all its members come to is bounded."""
        self._archive.unpacks_to(num_bytes)


def _unpacked(source: Source, spill_dir: Path | None) -> Iterator[_Member]:
    """The members, whose content lasts as long as this goes on; all entries are looked at before the first."""
    with copied(source, spill_dir) as file:
        for info in _members(file):
            yield _Member(source, file, info)


class _Onward(Tally):
    """The tally of the archive, told the lines of its members as if these were one file."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally, self.label = tally, tally.label
        self._before = self._last = 0

    def begin(self) -> None:
        """The next member."""
        self._before = self._last

    def _line(self, line: int) -> int:
        self._last = max(self._last, self._before + line)
        return self._before + line

    def _lines(self, lines: Sequence[int]) -> list[int]:
        shifted: list[int] = (np.asarray(lines, np.int64) + self._before).tolist()
        self._last = max([self._last, *shifted[-1:]])
        return shifted

    def count(self, reason: str, number: int = 1) -> None:
        self._tally.count(reason, number)

    def note(self, reason: str, line: int, column: int | None = None, text: str | bytes = "") -> None:
        self._tally.note(reason, self._line(line), column, text)

    def drop(self, reason: str, line: int, column: int | None = None, text: str | bytes = "") -> None:
        self._tally.drop(reason, self._line(line), column, text)

    def labelled(self, line: int, text: str) -> None:
        self._tally.labelled(self._line(line), text)

    def stamped(self, lines: Sequence[int], instants_N: NDArray[np.int64]) -> None:
        self._tally.stamped(self._lines(lines), instants_N)

    def usable_rows(
        self,
        rows_ND: Floats,
        place: Callable[[int, int], tuple[int, int | None, str]],
        lines: Sequence[int] | None = None,
    ) -> Floats:
        def shifted(row: int, metric: int) -> tuple[int, int | None, str]:
            line, column, text = place(row, metric)
            return self._line(line), column, text

        return self._tally.usable_rows(rows_ND, shifted, None if lines is None else self._lines(lines))


class _Bounded:
    """The archive as tarfile reads its headers: never more at once than a header may have."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise _malformed(f"a header has {size:,} bytes")
        return self._file.read(size)


def _members(file: IO[bytes]) -> list[tarfile.TarInfo]:
    """The plain files in order of name. Raises DataError for all that an archive of telemetry has not."""
    size = file.tell()
    file.seek(0)
    found: dict[str, tarfile.TarInfo] = {}
    try:
        with tarfile.open(fileobj=_Bounded(file), mode="r:") as archive:  # type: ignore[call-overload]
            for info in _entries(archive, size):
                info.name = "/".join(part for part in info.name.split("/") if part not in {"", "."})
                if info.isdir() or any(part.startswith(".") for part in info.name.split("/")):
                    continue
                if info.name in found:
                    raise _malformed(f"it has two files of the name {printable(info.name)}")
                found[info.name] = info
            end = archive.offset
    except DAMAGES as error:
        if "unexpected end" in str(error) or "truncated" in str(error):
            raise _truncated() from error
        raise _malformed(str(error)) from error
    _check_end(file, end)
    if not found:
        raise DataError("empty", "the archive holds no file", remedy=REMEDY)
    return [found[name] for name in sorted(found)]


def _entries(archive: tarfile.TarFile, size: int) -> Iterator[tarfile.TarInfo]:
    num_entries = 0
    while (info := archive.next()) is not None:
        num_entries += 1
        if num_entries > MAX_ENTRIES:
            raise DataError("too_large", f"the archive has more than {MAX_ENTRIES:,} entries", remedy="split it")
        if info.size < 0:  # tarfile would go back in the archive, for ever
            raise _malformed("an entry has a negative size")
        kind = "" if (info.isreg() and not info.issparse()) or info.isdir() else "no plain file"
        if info.name.startswith("/") or ".." in info.name.split("/"):
            kind = "outside of the archive"
        if kind:
            raise DataError("unsupported_format", f"{printable(info.name)} in the archive is {kind}", remedy=REMEDY)
        if info.isreg() and info.offset_data + info.size > size:
            raise _truncated()
        yield info


def _check_end(file: IO[bytes], end: int) -> None:
    """An archive ends with a block of zeros, and has zeros behind it: what was added there tarfile does not see."""
    file.seek(end)
    is_first = True
    while (block := file.read(BLOCK_BYTES)) or is_first:
        if is_first and len(block) < tarfile.BLOCKSIZE:
            raise _truncated()
        if block.strip(b"\0"):
            raise _malformed("there is something behind its end")
        is_first = False


@contextmanager
def _named(member: _Member) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise error.within(member.name) from error


def _truncated() -> DataError:
    return DataError("truncated", "the tar archive has no end", remedy="the copy was cut short: copy it again")


def _malformed(message: str) -> DataError:
    return DataError("malformed", f"the tar archive can not be read: {message:.200}", remedy="pack it again")
