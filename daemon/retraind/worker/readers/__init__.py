"""Readers: one file of telemetry to rows of float64. The format is found by content, never by the file's name.

A reader knows its `format` and `columns` once it is made, and `rows` streams the metrics that were chosen from them.
Raises DataError empty, encoding and unsupported_format here, and what the readers raise.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.readers import arrowipc, exposition, npy, npz, parquet, tar
from retraind.worker.readers.columns import Column
from retraind.worker.readers.delimited import DelimitedReader
from retraind.worker.readers.jsonlines import JsonLinesReader
from retraind.worker.readers.lines import UTF8_BOM
from retraind.worker.readers.recognise import series_reader
from retraind.worker.readers.source import Source
from retraind.worker.readers.tally import Tally
from retraind.worker.readers.unpack import CODECS

# Past any magic number, tar's at 257 included, and far enough into a file to meet the NULs of a binary one.
HEAD_BYTES = 4096
# What people drop by mistake, by the first bytes: the file formats' own documents and file(1)'s list.
FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive (.zip, .xlsx, .pt)"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip"),
    (b"\x04\x22\x4d\x18", "LZ4"),
    (b"\xff\x06\x00\x00sNaPpY", "Snappy"),
    (b"FEA1", "Feather of version 1, which nothing writes any more"),
    (b"ORC", "ORC"),
    (b"Obj\x01", "Avro"),
    (b"\x89HDF", "HDF5"),
    (b"SQLite format 3\x00", "SQLite"),
    (b"\xd0\xcf\x11\xe0", "an old Excel file"),
    (b"%PDF", "PDF"),
    (b"\x7fELF", "a program"),
    (b"\x89PNG", "a picture"),
    *((codec.magic, f"{codec.name} within another compression") for codec in CODECS),
)
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
PICKLE_PROTOCOLS = b"\x02\x03\x04\x05"
# Where a file of too few rows may be no accident but a misunderstanding, by format.
HOW_TO_COLLECT = {"prometheus": exposition.HOW_TO_COLLECT}
REMEDY = "write CSV, JSON lines or .npy, plain or compressed by gzip, bzip2, xz or zstd"


class Reader(Protocol):
    """What a format has to offer."""

    @property
    def format(self) -> str: ...
    @property
    def columns(self) -> Sequence[Column]: ...
    def rows(self, metric_names: Sequence[str], tally: Tally) -> Iterator[NDArray[np.float64]]:
        """Yields arrays of shape (N, D) of rows in which a metric has a value; others are told to the tally.

        NaN is a missing value. Or what the tally makes of them: one that keeps a log of rows gives all of them back.
        """
        ...


def open_reader(source: Source, limits: DataConfig, spill_dir: Path | None = None) -> Reader:
    """The reader for a file's content. `spill_dir` takes unnamed temporary files; None is the system's own place."""
    head = source.peek(HEAD_BYTES)
    if not head:
        what = "unpacks to 0 bytes" if source.compression else "has 0 bytes"
        raise DataError("empty", f"{source.name} {what}", remedy="look whether its producer ran out of disk space")
    if head.startswith(npy.MAGIC):
        return npy.NpyReader(source, limits, spill_dir)
    if head.startswith(parquet.MAGIC):
        return parquet.ParquetReader(source, limits, spill_dir)
    if head.startswith((arrowipc.START, arrowipc.CONTINUATION)):
        return arrowipc.ArrowIpcReader(source, limits, spill_dir)
    if tar.is_tar(head):
        return tar.TarReader(source, limits, spill_dir, lambda member: open_reader(member, limits, spill_dir))
    if npz.is_npz(head):
        return npz.NpzReader(source, limits, spill_dir)
    refuse_foreign(head, source.name)
    if reader := series_reader(source, limits, head):
        return reader
    if head.removeprefix(UTF8_BOM).lstrip().startswith(b"{"):
        return JsonLinesReader(source, limits)
    return DelimitedReader(source, limits)


def refuse_foreign(head: bytes, name: str) -> None:
    """Raises DataError unsupported_format or encoding if the first bytes are no text in UTF-8's family."""
    foreign = next((what for magic, what in FOREIGN if head.startswith(magic)), None)
    if head[:1] == b"\x80" and head[1:2] in PICKLE_PROTOCOLS:
        foreign = "a Python pickle, which is never loaded"
    if foreign is None and (head.startswith(UTF16_BOMS) or _is_utf16(head)):
        raise DataError(
            "encoding", f"{name} is UTF-16; UTF-8 is expected", line=1, remedy="convert it: iconv -f UTF-16 -t UTF-8"
        )
    if foreign is None and b"\0" in head:
        foreign = "binary data"
    if foreign is not None:
        raise DataError("unsupported_format", f"{name} looks like {foreign}", remedy=REMEDY)


def _is_utf16(head: bytes) -> bool:
    """UTF-16 without a mark, of text that is mostly ASCII: every other byte is NUL, and the ones between are not."""
    even, odd = head[::2], head[1::2]
    return len(head) >= 4 and any(not a.strip(b"\0") and b"\0" not in b for a, b in ((even, odd), (odd, even)))
