"""Every durable file operation: atomic write, move, fsync of file and directory, digest.

What is promised: when a function returns, its effect survives a crash of the process, and of the machine as far as
fsync does on this filesystem. What is not: POSIX leaves open what a failed fsync has dropped, so a file whose fsync
failed is never trusted or retried in place, only written anew under another name. Raises OSError unchanged.
"""

import ctypes
import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_COPY_BYTES = 2**20


def fsync_dir(path: Path) -> None:
    """Makes the names in a directory durable: without it a rename can be undone by a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_new(path: Path, data: bytes, *, mode: int = 0o644, sync: bool = True) -> None:
    """Writes and, with `sync`, syncs a file that must not exist yet; its name is durable once the directory is synced.

    The mode is set whatever the umask. On any error the partial file is removed.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replaces a file's content: a reader, or a power cut, sees the old bytes or the new ones, never a mixture.

    Costs two fsyncs. One writer per path: the temporary name is fixed, so a left-over of a crash is overwritten.
    """
    temporary = _temporary(path)
    write_new(temporary, data, mode=mode)
    _replace(temporary, path)
    fsync_dir(path.parent)


def write_volatile(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replaces a file's content atomically for readers, with no promise after a power cut and no fsync."""
    temporary = _temporary(path)
    write_new(temporary, data, mode=mode, sync=False)
    _replace(temporary, path)


def _temporary(path: Path) -> Path:
    """The name beside `path` under which its next content is made, freed of what a crash left there."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    return temporary


def _replace(temporary: Path, path: Path) -> None:
    try:
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_dir(path: Path, mode: int | None) -> None:
    """Creates a directory with parents, durably, with this mode whatever the umask. An existing one is left alone.

    So it gets its name last: one that a crash left with another mode would be taken for the right one the next time,
    and one whose fsync failed for a durable one. Parents (mode None) are as the umask has it. Costs two fsyncs.
    """
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_dir(path.parent, None)
    temporary = path.with_name(f".{path.name}.tmp")
    with suppress(FileNotFoundError):
        temporary.rmdir()  # of a crash
    temporary.mkdir()
    try:
        if mode is not None:
            temporary.chmod(mode)
        fsync_dir(temporary)
        _rename_exclusive(os.fsencode(temporary), os.fsencode(path))
    except OSError:
        with suppress(OSError):
            temporary.rmdir()
        if not path.is_dir():  # else another process was faster
            raise
    try:
        fsync_dir(path.parent)
    except OSError:
        with suppress(OSError):
            path.rmdir()
        raise


@contextmanager
def as_owner_of(directory: Path) -> Iterator[None]:
    """What root does meanwhile is done by the directory's owner and group: the owner can change what root made there.

    Does nothing for any other user. It is the whole process that changes: for a command, not beside other threads.
    """
    if os.geteuid() != 0:
        yield
        return
    info, group = directory.stat(), os.getegid()
    os.setegid(info.st_gid)
    try:
        os.seteuid(info.st_uid)
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def move(source: bytes, target: bytes) -> None:
    """Renames within one filesystem and makes both directories durable. Never overwrites: raises FileExistsError."""
    _rename_exclusive(source, target)
    fsync_dir(Path(os.fsdecode(os.path.dirname(target))))
    fsync_dir(Path(os.fsdecode(os.path.dirname(source))))


def _rename_exclusive(source: bytes, target: bytes) -> None:
    """renameat2(2) with RENAME_NOREPLACE, which Python does not offer.

    A filesystem without it (NFS) gets a look and a plain rename: right as long as nobody else writes that name.
    """
    result = _libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE)
    if result == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), os.fsdecode(source), None, os.fsdecode(target))
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(target))
    os.rename(source, target)


def replace_link(path: Path, target: str) -> None:
    """Points a symbolic link at `target` in one rename: a reader always finds the old or the new one. Durable."""
    temporary = _temporary(path)
    temporary.symlink_to(target)
    _replace(temporary, path)
    fsync_dir(path.parent)


def sha256_of(path: Path) -> str:
    """The digest of a file's bytes, in hex. Reads all of it: not for the supervisor and a dataset."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sha256_of_bytes(data: bytes) -> str:
    """The digest of bytes in memory, in hex."""
    return hashlib.sha256(data).hexdigest()
