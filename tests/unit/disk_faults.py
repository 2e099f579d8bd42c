"""A disk that fails at a chosen call: the os functions that change a disk, one call of them raising OSError."""

import errno
import os
import stat
from collections.abc import Callable
from typing import Any

import pytest

# Every function through which fsio and publish change something.
_CHANGING = ("open", "write", "fsync", "fchmod", "mkdir", "chmod", "rename", "replace", "symlink", "link")
CODES = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}


class DiskFault:
    """Fails the `nth` of the calls that `matches` picks, once; counts them all the while."""

    def __init__(self, code: int, matches: Callable[[str, tuple[Any, ...]], bool], nth: int = 1) -> None:
        self.error = OSError(code, os.strerror(code))
        self.num_calls = 0
        self.failed_at = ""
        self._matches, self._nth = matches, nth

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stands between the code and the os module until the patch is undone."""
        for name in _CHANGING:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._matches(name, args):
                self.num_calls += 1
                if self.num_calls == self._nth:
                    self.failed_at = f"{name}{args}"
                    raise self.error
            return function(*args, **kwargs)

        return call


def any_change(name: str, args: tuple[Any, ...]) -> bool:
    """Every call that changes the disk; an open counts when it may create."""
    return name != "open" or bool(args[1] & os.O_CREAT)


def is_file_open(name: str, args: tuple[Any, ...]) -> bool:
    return name == "open" and bool(args[1] & os.O_CREAT)


def is_write(name: str, _args: tuple[Any, ...]) -> bool:
    return name == "write"


def is_file_fsync(name: str, args: tuple[Any, ...]) -> bool:
    return name == "fsync" and stat.S_ISREG(os.fstat(args[0]).st_mode)


def is_dir_fsync(name: str, args: tuple[Any, ...]) -> bool:
    return name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)


def is_rename(name: str, _args: tuple[Any, ...]) -> bool:
    return name in ("rename", "replace")


def write_at_most(num_bytes: int, patch: pytest.MonkeyPatch) -> None:
    """Every write takes no more than this at once, as a nearly full disk does."""
    write = os.write
    patch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:num_bytes]))


def synced(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> list[str]:
    """The paths that were fsynced, in order, by the name that each had at that moment."""
    paths: list[str] = []
    fsync = os.fsync

    def record(fd: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", record)
        action()
    return paths
