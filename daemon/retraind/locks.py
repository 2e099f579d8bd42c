"""Locks between processes: one service per spool and state directory.

Open file description locks, on a file that stays where it is: the kernel releases them when the holder dies, so no
lock is ever stale, and one can ask for a holder without taking the lock, so that a command that looks never gets in
the way of a service that starts. Raises HostError for a lock that another process holds, OSError when the file can
not be made. Source: fcntl(2).
"""

import fcntl
import os
import struct
from pathlib import Path

from retraind.errors import HostError

# struct flock of 64-bit Linux: type, whence, start, length (0: to the end), pid (0 as fcntl demands), padding.
_FLOCK = "hhqqi4x"
_WHOLE_FILE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
# Held until the process ends: closing a descriptor would give the lock back.
_held: dict[Path, int] = {}


def take_lock(path: Path, what: str) -> None:
    """Takes the lock for the rest of this process. Taking it again is harmless. Raises HostError when it is held."""
    if path in _held:
        return
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except BlockingIOError:
        os.close(fd)
        remedy = f"`fuser -v {path}` names it"
        raise HostError("already_running", f"{what} is held by another process", remedy=remedy) from None
    _held[path] = fd


def is_locked(path: Path) -> bool:
    """True when some process holds the lock. Takes nothing. A file that this user may not open counts as free."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE_FILE)
    finally:
        os.close(fd)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
