"""Locks between processes: one service per spool and state directory, one publisher per model.

flock on a file that stays where it is: the kernel releases it when the holder dies, so no lock is ever stale.
Raises HostError for a lock that another process holds, OSError when the file can not be made.
"""

import fcntl
import os
from pathlib import Path

from retraind.errors import HostError

# Held until the process ends: closing a descriptor would give the lock back.
_held: dict[Path, int] = {}


def take_lock(path: Path, what: str) -> None:
    """Takes the lock for the rest of this process. Taking it again is harmless. Raises HostError when it is held."""
    if path in _held:
        return
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise HostError(
            "already_running", f"{what} is held by another process", remedy=f"`fuser -v {path}` names it"
        ) from None
    _held[path] = fd


def is_locked(path: Path) -> bool:
    """True when some process, this one included, holds the lock."""
    if path in _held:
        return True
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
