"""Arrow's own format to rows of float64: IPC files, which Feather of version 2 is, and IPC streams.

Owns the frame: a file is a stream between two marks and a directory, so both are streamed, message by message, and
nothing is handed to pyarrow before the bytes that it would take, packed and unpacked, are known and bounded. What the
columns mean is `arrowtable`'s. Raises DataError truncated, malformed, too_large, and what `arrowtable` raises. Format:
"Arrow Columnar Format", its sections on IPC; the offsets are those of Message.fbs, read as FlatBuffers lays them out.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retraind.errors import DataError
from retraind.worker.readers.arrowtable import MAX_GROUP_BYTES, ArrowTableReader
from retraind.worker.readers.source import Source

FILE_MAGIC, CONTINUATION = b"ARROW1", b"\xff\xff\xff\xff"
START = FILE_MAGIC + b"\0\0"
BLOCK_BYTES = 2**20
# A schema of thousands of columns has a megabyte.
MAX_METADATA_BYTES = 2**25
# Message: which header there is, the header, and the length of the body. Headers: RecordBatch, DictionaryBatch.
HEADER_TYPE, HEADER, BODY_LENGTH = 1, 2, 3
RECORD_BATCH, DICTIONARY_BATCH = 3, 2
DICTIONARY_DATA = 1
BUFFERS, COMPRESSION = 2, 3


class ArrowIpcReader(ArrowTableReader):
    """Reads one file or stream."""

    format = "arrow"
    what = "Apache Arrow file"

    def parts(self, source: Source, spill_dir: Path | None) -> Iterator[Any]:  # noqa: ARG002
        """The schema, then the batches as they were written."""
        messages = _Messages(source)
        with self.errors():
            stream = self.arrow.ipc.open_stream(self.arrow.PythonFile(messages, mode="r"))
        yield stream.schema
        while True:
            with self.errors():
                try:
                    batch = stream.read_next_batch()
                except StopIteration:
                    break
                batch = batch.select(self.numeric_names)
                batch.validate(full=True)
            yield batch
        messages.finish()


class _Messages:
    """The messages as a file to read from, each one checked as a whole before the first byte of it is given."""

    closed = False

    def __init__(self, source: Source) -> None:
        self._source = source
        self._is_file = source.peek(len(START)) == START
        if self._is_file:
            source.read(len(START))
        self._pending: list[bytes] = []

    def read(self, size: int) -> bytes:
        """As much of one message as was asked for, b"" behind the last one."""
        if not self._pending:
            self._pending = self._next()
        part = self._pending.pop(0) if self._pending else b""
        if len(part) > size:  # heads only: a body is asked for as a whole, and is not copied
            self._pending.insert(0, part[size:])
        return part[:size]

    def close(self) -> None:
        """As a file has it."""

    def finish(self) -> None:
        """Raises DataError truncated if a file does not end as one; behind its messages is a directory of them."""
        end = b""
        while block := self._source.read(BLOCK_BYTES):
            end = (end + block)[-len(FILE_MAGIC) :]
        if self._is_file and end != FILE_MAGIC:
            raise _truncated()

    def _next(self) -> list[bytes]:
        """Head and body of the next message."""
        frame = self._source.read(8)
        if not frame and not self._is_file:  # a stream may end without a mark
            return []
        if len(frame) < 8:
            raise _truncated()
        if frame[:4] != CONTINUATION:
            raise _malformed("a message does not begin as one")
        length = int.from_bytes(frame[4:], "little", signed=True)
        if length == 0:
            return [frame]
        if not 0 < length <= MAX_METADATA_BYTES:
            raise _malformed(f"a message has a header of {length:,} bytes")
        metadata = self._source.read(length)
        if len(metadata) < length:
            raise _truncated()
        try:
            return list(filter(None, (frame + metadata, self._body(metadata))))
        except (struct.error, ValueError) as error:
            raise _malformed(f"the header of a message can not be read: {error}") from error

    def _body(self, metadata: bytes) -> bytes:
        message = _Table(metadata, _unsigned(metadata, 0))
        size = message.number(BODY_LENGTH, "<q")
        self._check(size)
        body = self._source.read(size)
        if len(body) < size:
            raise _truncated()
        batch = message.table(HEADER)
        kind = message.number(HEADER_TYPE, "<B")
        if batch is not None and kind == DICTIONARY_BATCH:
            batch = batch.table(DICTIONARY_DATA)
        if batch is not None and kind in {RECORD_BATCH, DICTIONARY_BATCH} and batch.table(COMPRESSION):
            # Each packed buffer begins with the number of bytes that it unpacks to, -1 where it is not packed.
            buffers = batch.vector(BUFFERS, "<qq")
            starts = [start for start, length in buffers if length >= 8]
            unpacked = sum(max(0, struct.unpack_from("<q", body, start)[0]) for start in starts if start >= 0)
            self._check(unpacked)
            self._source.unpacks_to(unpacked)
        return body

    def _check(self, size: int) -> None:
        if size < 0:
            raise _malformed(f"a message has {size:,} bytes")
        if size > MAX_GROUP_BYTES:
            raise _too_large(size)


class _Table:
    """A table of FlatBuffers: fields by their number, found through the table's directory. Raises struct.error."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self._position = data, position
        self._directory = position - struct.unpack_from("<i", data, position)[0]
        if self._directory < 0:
            raise ValueError("a table lies outside of it")
        self._size = struct.unpack_from("<H", data, self._directory)[0]

    def _field(self, number: int) -> int:
        """Where a field is; 0 for one that is not there, which has its default."""
        slot = 4 + 2 * number
        if slot + 2 > self._size:
            return 0
        offset: int = struct.unpack_from("<H", self._data, self._directory + slot)[0]
        return self._position + offset if offset else 0

    def number(self, number: int, form: str) -> int:
        """A field of one number."""
        field = self._field(number)
        return int(struct.unpack_from(form, self._data, field)[0]) if field else 0

    def table(self, number: int) -> "_Table | None":
        """A field that is a table."""
        field = self._field(number)
        return _Table(self._data, field + _unsigned(self._data, field)) if field else None

    def vector(self, number: int, form: str) -> list[tuple[int, ...]]:
        """A field that is a row of structures."""
        if not (field := self._field(number)):
            return []
        start = field + _unsigned(self._data, field)
        size = struct.calcsize(form) * _unsigned(self._data, start)
        data = self._data[start + 4 : start + 4 + size]
        if len(data) < size:
            raise ValueError("a row of numbers ends outside of it")
        return list(struct.iter_unpack(form, data))


def _unsigned(data: bytes, position: int) -> int:
    return int(struct.unpack_from("<I", data, position)[0])


def _truncated() -> DataError:
    return DataError("truncated", "the Arrow file has no end", remedy="the copy was cut short: copy it again")


def _malformed(message: str) -> DataError:
    return DataError("malformed", f"the Arrow file can not be read: {message}", remedy="write it or copy it again")


def _too_large(size: int) -> DataError:
    return DataError(
        "too_large",
        f"a batch has {size:,} bytes unpacked; {MAX_GROUP_BYTES:,} are allowed",
        remedy="write batches of fewer rows",
    )
