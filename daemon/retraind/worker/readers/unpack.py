"""Compressed bytes to content: gzip, bzip2, xz and zstd, known by their first bytes, all members one after the other.

Owns what the libraries do not agree on: each codec is a `Decompressor` that ends with its member and never gives more
at once than was asked for. Raises DataError truncated and malformed, ReaderMissing where this Python has
nothing for a codec. Holds a member's window and one piece of input in memory, whatever it unpacks to.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from retraind.errors import DataError, ReaderMissing

# Libraries copy what a member leaves over, so a file of many short members is fed in small pieces.
PACKED_BYTES = 2**16
GZIP_WINDOW = 31  # zlib's word for "with a gzip header and trailer"
# xz -9 needs 65 MiB; what asks for more would exhaust the reader. zstd has the same bound built in.
MAX_XZ_BYTES = 2**27
# zstandard can not be told how much to give. A block of 4 bytes may hold 128 KiB, so this many give 32 MiB at most.
ZSTANDARD_BYTES = 2**10
OTHER_PYTHON = "set worker.python to an interpreter that was built with it, or compress by gzip"
INSTALL_ZSTANDARD = (
    "apt-get install python3-zstandard, or pip install zstandard for the interpreter of worker.python (Python 3.14 has "
    "its own); or compress by gzip, bzip2 or xz"
)


class Decompressor(Protocol):
    """One member: what bz2, lzma and compression.zstd have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


@dataclass(frozen=True)
class Codec:
    """A way to compress. `open` begins a member and gives what the library raises for bytes that are none of its."""

    name: str
    magic: bytes
    open: Callable[[], tuple[Decompressor, type[Exception]]]


class _Inflate:
    """zlib, which hands back what it has no room for instead of keeping it."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(GZIP_WINDOW)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


class _PacedZstd:
    """The module zstandard, fed in pieces so small that what each gives can be held."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._raw = memoryview(b"")
        self._out = memoryview(b"")

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof) and not self._out

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data) + bytes(self._raw)

    @property
    def needs_input(self) -> bool:
        return not self._raw and not self._out

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        if data:
            self._raw = memoryview(bytes(self._raw) + data)
        while not self._out and self._raw and not self._inner.eof:
            piece, self._raw = self._raw[:ZSTANDARD_BYTES], self._raw[ZSTANDARD_BYTES:]
            self._out = memoryview(self._inner.decompress(piece))
        part, self._out = self._out[:max_length], self._out[max_length:]
        return bytes(part)


def _library(names: tuple[str, ...], remedy: str) -> Any:
    """The first of these modules that this Python has: none is needed before a file asks for it."""
    for name in names:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ReaderMissing(
        "no_reader", f"the worker's Python can not unpack the file: it lacks {' and '.join(names)}", remedy=remedy
    )


def _open_bz2() -> tuple[Decompressor, type[Exception]]:
    library = _library(("bz2",), OTHER_PYTHON)
    return library.BZ2Decompressor(), OSError


def _open_xz() -> tuple[Decompressor, type[Exception]]:
    library = _library(("lzma",), OTHER_PYTHON)
    return library.LZMADecompressor(library.FORMAT_XZ, MAX_XZ_BYTES), library.LZMAError


def _open_zstd() -> tuple[Decompressor, type[Exception]]:
    library = _library(("compression.zstd", "zstandard"), INSTALL_ZSTANDARD)
    if library.__name__ == "zstandard":
        return _PacedZstd(library.ZstdDecompressor().decompressobj()), library.ZstdError
    return library.ZstdDecompressor(), library.ZstdError


CODECS = (
    Codec("gzip", b"\x1f\x8b", lambda: (_Inflate(), zlib.error)),
    Codec("bz2", b"BZh", _open_bz2),
    Codec("xz", b"\xfd7zXZ\x00", _open_xz),
    Codec("zstd", b"\x28\xb5\x2f\xfd", _open_zstd),
)


def codec_of(head: bytes) -> Codec | None:
    """The codec of a file that begins with these bytes, None if it is not compressed."""
    return next((codec for codec in CODECS if head.startswith(codec.magic)), None)


class Unpacker:
    """Unpacks members one after the other. `raw` are the first bytes, `read_raw` gives the ones that follow."""

    def __init__(self, codec: Codec, raw: bytes, read_raw: Callable[[int], bytes]) -> None:
        self._codec = codec
        self._raw = raw
        self._read_raw = read_raw
        self._member, self._library_error = codec.open()

    def read(self, size: int) -> bytes:
        """At least one byte and at most `size`, b"" at the end of the last member."""
        while True:
            if self._member.eof and not self._next_member():
                return b""
            is_end = False
            if not self._raw and self._member.needs_input:
                self._raw = self._read_raw(PACKED_BYTES)
                is_end = not self._raw
            try:
                data = self._member.decompress(self._raw, size)
            except self._library_error as error:
                raise DataError(
                    "malformed",
                    f"the {self._codec.name} data can not be unpacked: {error}",
                    remedy="compress or copy the file again",
                ) from error
            self._raw = self._member.unused_data if self._member.eof else b""
            if data:
                return data
            if is_end and not self._member.eof:
                raise DataError(
                    "truncated",
                    f"the {self._codec.name} data end too early",
                    remedy="the copy was cut short: copy the file again",
                )

    def _next_member(self) -> bool:
        """Begins the member that follows. Zero bytes are padding, as tapes, gzip and xz have it."""
        while not (rest := self._raw.lstrip(b"\0")):
            self._raw = self._read_raw(PACKED_BYTES)
            if not self._raw:
                return False
        self._raw = rest
        self._member, self._library_error = self._codec.open()
        return True
