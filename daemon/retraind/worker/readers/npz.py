"""NumPy's .npz archives to rows: one array of two dimensions, or arrays of one dimension and length as columns.

Owns which arrays of an archive are the table. The archive is copied to an unnamed temporary file, since a zip is read
from its end; its arrays are unpacked as a stream, which `npy` reads as one file. Nothing is unpickled, ever. Raises
DataError shape, object_dtype, no_numeric, truncated, malformed, too_large, unsupported_format.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy_format

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.printable import printable
from retraind.worker.readers import npy
from retraind.worker.readers.columns import Column, listed
from retraind.worker.readers.source import Source
from retraind.worker.readers.spill import copied

MAGIC = b"PK\x03\x04"
SUFFIX = ".npy"
# Of the first member's header: where the length of its name stands, and the name.
NAME_LENGTH, NAME = slice(26, 28), 30
BLOCK_VALUES = 2**17
# What zipfile raises for an archive that is none: offsets before the file, flags that nobody has, lengths that lie.
DAMAGES = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, OverflowError, struct.error)


def is_npz(head: bytes) -> bool:
    """Whether this is a zip archive whose first member is an array."""
    length = int.from_bytes(head[NAME_LENGTH], "little")
    return head.startswith(MAGIC) and head[NAME : NAME + length].endswith(SUFFIX.encode())


class NpzReader(npy.NpyReader):
    """Reads one archive. Arrays of one dimension are columns by their names, in the order of the archive."""

    format = "npz"

    def __init__(self, source: Source, limits: DataConfig, spill_dir: Path | None) -> None:
        archive = _Archive(source, spill_dir)
        super().__init__(archive, limits, spill_dir)
        if archive.names:
            self.columns = [
                Column(printable(name), c.kind) for name, c in zip(archive.names, self.columns, strict=True)
            ]
        self.columns += [Column(printable(name), "text") for name in archive.ignored]


class _Archive:
    """An archive as the content of one .npy file. The names are known once it was looked at."""

    def __init__(self, source: Source, spill_dir: Path | None) -> None:
        self.names: list[str] = []
        self.ignored: list[str] = []
        self._blocks = self._unpacked(source, spill_dir)
        self._pushed = b""

    def read(self, size: int) -> bytes:
        """The next bytes; fewer only at the end."""
        parts, missing = [self._pushed], size - len(self._pushed)
        while missing > 0 and (block := next(self._blocks, b"")):
            parts.append(block)
            missing -= len(block)
        data = b"".join(parts)
        self._pushed = data[size:]
        return data[:size]

    def peek(self, size: int) -> bytes:
        """The next bytes without taking them."""
        data = self.read(size)
        self._pushed = data + self._pushed
        return data

    def _unpacked(self, source: Source, spill_dir: Path | None) -> Iterator[bytes]:
        with copied(source, spill_dir) as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    yield from self._table(archive, source)
            except DAMAGES as error:
                is_cut = "not a zip file" in str(error)
                raise DataError(
                    "truncated" if is_cut else "malformed",
                    "the archive has no end" if is_cut else f"the archive is damaged: {error}",
                    remedy="the copy was cut short: copy the file again" if is_cut else "write it with numpy.savez",
                ) from error

    def _table(self, archive: zipfile.ZipFile, source: Source) -> Iterator[bytes]:
        members = archive.infolist()
        _check_members(members)
        source.unpacks_to(sum(member.file_size for member in members))
        arrays = {member.filename.removesuffix(SUFFIX): _header(archive, member) for member in members}
        if len(arrays) == 1 and len(next(iter(arrays.values()))[0]) != 1:
            with archive.open(members[0]) as file:
                while block := file.read(npy.BLOCK_BYTES):
                    source.read(0)  # reads nothing, since all was read, but says that we are alive
                    yield block
            return
        num_rows = _common_length({name: shape for name, (shape, _) in arrays.items()})
        _check_types(arrays)
        is_used = {name: dtype.kind in "fiu" for name, (_, dtype) in arrays.items()}
        self.names = [name for name in arrays if is_used[name]]
        self.ignored = [name for name in arrays if not is_used[name]]
        if not self.names:
            raise DataError(
                "no_numeric",
                f"no array is of numbers: {listed(map(printable, arrays))}",
                remedy="save arrays of float64",
            )
        yield _fortran_header(num_rows, len(self.names))
        for member in members:
            if is_used[member.filename.removesuffix(SUFFIX)]:
                with archive.open(member) as file:
                    yield from _values(file, num_rows, source)


def _check_members(members: list[zipfile.ZipInfo]) -> None:
    if strange := [member.filename for member in members if not member.filename.endswith(SUFFIX)]:
        raise _unsupported(f"an archive that holds {listed(map(printable, strange))} beside arrays")
    if len({member.filename for member in members}) < len(members):
        raise DataError("ambiguous_columns", "the archive has two arrays of one name", remedy="name each array once")
    if any(member.flag_bits & 1 for member in members):
        raise _unsupported("an encrypted archive")
    if any(member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED} for member in members):
        raise _unsupported("an archive that is packed by another method than numpy's")


def _header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], "np.dtype[np.generic]"]:
    with archive.open(member) as file:
        shape, _, dtype = npy.read_header(io.BytesIO(file.read(npy.MAX_HEADER_BYTES + 16)))
    return shape, dtype


def _common_length(shapes: dict[str, tuple[int, ...]]) -> int:
    """The length of arrays of one dimension."""
    first = next(iter(shapes.values()))
    if all(shape == first for shape in shapes.values()) and len(first) == 1:
        return first[0]
    found = listed(f"{printable(name)} of shape {shape}" for name, shape in shapes.items())
    raise DataError(
        "shape",
        f"the archive holds {found}; one array of two dimensions or several of one dimension and length are expected",
        remedy="save the table alone, or each column as an array",
    )


def _check_types(arrays: dict[str, tuple[tuple[int, ...], "np.dtype[np.generic]"]]) -> None:
    for name, (_, dtype) in arrays.items():
        if dtype.hasobject:
            raise DataError(
                "object_dtype",
                f"the array {printable(name[:60])} holds Python objects, which are never unpickled",
                remedy="save it as float64, or as text of a fixed length",
            )


def _fortran_header(num_rows: int, num_columns: int) -> bytes:
    """Columns one after the other are an array in Fortran order."""
    head = io.BytesIO()
    shape = {"descr": "<f8", "fortran_order": True, "shape": (num_rows, num_columns)}
    npy_format.write_array_header_1_0(head, shape)
    return head.getvalue()


def _values(file: IO[bytes], num_rows: int, source: Source) -> Iterator[bytes]:
    """The numbers of one array as float64."""
    head = io.BytesIO(file.read(npy.MAX_HEADER_BYTES + 16))
    _, _, dtype = npy.read_header(head)
    rest = head.read()
    for start in range(0, num_rows, BLOCK_VALUES):
        source.read(0)  # reads nothing, since all was read, but says that we are alive
        num_bytes = min(BLOCK_VALUES, num_rows - start) * dtype.itemsize
        data, rest = rest[:num_bytes], rest[num_bytes:]
        data += file.read(num_bytes - len(data))
        if len(data) < num_bytes:
            raise DataError("truncated", "an array of the archive ends too early", remedy="write it with numpy.savez")
        yield npy.as_float64(np.frombuffer(data, dtype)).astype("<f8", copy=False).tobytes()
    if rest or file.read(1):
        raise DataError(
            "malformed", "there are bytes after an array of the archive", remedy="write it with numpy.savez"
        )


def _unsupported(what: str) -> DataError:
    return DataError("unsupported_format", f"the file is {what}", remedy="write it with numpy.savez")
