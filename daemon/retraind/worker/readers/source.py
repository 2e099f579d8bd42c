"""One dataset file as a stream of content bytes: opened safely, hashed, decompressed and bounded.

Owns the descriptor, the digest of the raw bytes and the proof that the file stayed the same while it was read. Never
writes, never follows a link, never looks at what the bytes mean. Raises IntakeError not_regular and vanished, DataError
too_large and what unpack.py raises, DatasetChanged, HostError unreadable and host_io.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from retraind.config import DataConfig
from retraind.errors import DataError, DatasetChanged, HostError, IntakeError
from retraind.printable import printable
from retraind.worker.readers.unpack import Unpacker, codec_of

# A FIFO must not block the open, and nothing is followed out of the spool.
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Large enough that a system call costs nothing beside hashing, small enough to say often how far we are.
RAW_BYTES = 2**20
# What unpacks to no more is read whatever it was packed from: it costs a second, and small files pack oddly.
SMALL_BYTES = 64 * 2**20

Beat = Callable[[float | None], None]


def open_regular(path: Path) -> tuple[int, str]:
    """A descriptor of the file at `path`, or of the one file in the directory at `path`, and its printable name."""
    try:
        fd = os.open(path, OPEN_FLAGS)
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            return _only_regular(fd, path.name), printable(path.name)
        try:
            name = _only_entry(fd, path)
            return _only_regular(os.open(name, OPEN_FLAGS, dir_fd=fd), name), printable(name)
        finally:
            os.close(fd)
    except OSError as error:
        raise _open_error(error, path) from error


def _only_entry(directory: int, path: Path) -> str:
    names = os.listdir(directory)
    if not names:
        raise IntakeError("vanished", f"{printable(str(path))} holds no file", remedy="drop the file again")
    if len(names) > 1:
        raise IntakeError(
            "not_regular",
            f"{printable(str(path))} is a directory of {len(names)} entries; one file is expected",
            remedy="name the files one by one",
        )
    return names[0]


def _only_regular(fd: int, name: str) -> int:
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise IntakeError("not_regular", f"{printable(name)} is not a regular file", remedy="drop a plain file")


def _open_error(error: OSError, path: Path) -> IntakeError | HostError:
    name = printable(str(path))
    if error.errno in {errno.ELOOP, errno.ENXIO, errno.ENODEV}:  # a symbolic link, a socket, a device without driver
        return IntakeError("not_regular", f"{name} is not a regular file", remedy="drop a plain file, not a link to it")
    if error.errno in {errno.ENOENT, errno.ENOTDIR}:
        return IntakeError("vanished", f"{name} is not there any more", remedy="drop the file again")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return HostError("unreadable", f"{name} can not be opened: {error.strerror}", remedy="make it readable")
    return HostError("host_io", f"{name} can not be opened: {error.strerror}", remedy="look into the kernel's log")


class Source:
    """The content of one file, read once from the beginning to the end.

    `read` and `peek` give content bytes, unpacked where the file is compressed; `size` is that of the file itself.
    `finish` must be called after the last read: it reads what is left, so that the digest is of the whole file, and
    checks that the file did not change.
    """

    def __init__(self, path: Path, limits: DataConfig, beat: Beat = lambda _: None) -> None:
        self._fd, self.name = open_regular(path)
        self._limits = limits
        self._beat = beat
        self._digest = hashlib.sha256()
        self._pushed = b""
        self._num_unpacked = 0
        self.num_bytes = 0
        try:
            self._before = _identity(self._fd)
            self.size = self._before[1]
            self._check_raw_size(self.size)
            raw = self._read_raw(RAW_BYTES)
            codec = codec_of(raw)
            self._unpacker = Unpacker(codec, raw, self._read_raw) if codec else None
        except BaseException:
            os.close(self._fd)
            raise
        self.compression = codec.name if codec else ""
        self._pushed = b"" if codec else raw

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes. An error that a writer at work would explain becomes DatasetChanged."""
        try:
            if isinstance(error, DataError):
                self._check_unchanged(error)
        finally:
            os.close(self._fd)

    @property
    def sha256(self) -> str:
        """Of the raw bytes read so far: of the file once `finish` has returned."""
        return self._digest.hexdigest()

    def read(self, size: int) -> bytes:
        """The next `size` bytes of content; fewer only at its end. Raises Interrupted if the beat does."""
        parts = [self._pushed[:size]]
        missing = size - len(parts[0])
        self._pushed = self._pushed[size:]
        while missing and (part := self._read_part(min(missing, RAW_BYTES))):
            parts.append(part)
            missing -= len(part)
            if self._unpacker:
                self.unpacks_to(len(part))
        self._beat(self._done_share())
        return b"".join(parts)

    def peek(self, size: int) -> bytes:
        """The next bytes without taking them."""
        head = self.read(size)
        self._pushed = head + self._pushed
        return head

    def unpacks_to(self, num_bytes: int) -> None:
        """Counts what came out of the file, or will, here or in a reader whose format packs. Raises too_large."""
        self._num_unpacked += num_bytes
        if self._num_unpacked > self._limits.max_uncompressed_bytes:
            raise DataError(
                "too_large",
                f"{self.name} unpacks to more than {self._limits.max_uncompressed_bytes:,} bytes",
                remedy="split it, or raise data.max_uncompressed_bytes",
            )
        ratio = self._limits.max_unpack_ratio
        if self._num_unpacked > max(SMALL_BYTES, ratio * self.size):
            raise DataError(
                "too_large",
                f"{self.name} has {self.size:,} bytes and unpacks to more than {ratio:,} times as many",
                remedy="look what made it: telemetry packs less; or raise data.max_unpack_ratio",
            )

    def finish(self) -> None:
        """Reads to the end of the raw file and raises DatasetChanged if it is not the file that was opened."""
        while self._read_raw(RAW_BYTES):
            self._beat(self._done_share())
        self._check_unchanged(None)

    def _read_part(self, size: int) -> bytes:
        return self._unpacker.read(size) if self._unpacker else self._read_raw(size)

    def _done_share(self) -> float | None:
        return min(1.0, self.num_bytes / self.size) if self.size else None

    def _read_raw(self, size: int) -> bytes:
        try:
            data = os.read(self._fd, size)
        except OSError as error:
            raise HostError(
                "host_io", f"{self.name} can not be read: {error.strerror}", remedy="look into the kernel's log"
            ) from error
        self._digest.update(data)
        self.num_bytes += len(data)
        if self.num_bytes > self.size:  # else a writer that never stops would keep us here
            self._check_unchanged(None)
        return data

    def _check_raw_size(self, size: int) -> None:
        if size > self._limits.max_bytes:
            raise DataError(
                "too_large",
                f"{self.name} has {size:,} bytes; {self._limits.max_bytes:,} are allowed",
                remedy="split it, or raise data.max_bytes",
            )

    def _check_unchanged(self, cause: BaseException | None) -> None:
        if _identity(self._fd) != self._before:
            raise DatasetChanged(
                "changed_while_reading",
                f"{self.name} was written to while it was read",
                remedy="write under a temporary name and rename it once it is complete",
            ) from cause


def _identity(fd: int) -> tuple[int, int, int]:
    status = os.fstat(fd)
    return status.st_ino, status.st_size, status.st_mtime_ns
