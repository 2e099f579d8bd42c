"""A small filesystem of its own that can be filled to its last byte: in a mount namespace that ends with its processes.

Needs root. The namespace is that of the test's thread and of what it starts: nothing is mounted for anybody else, and
nothing is left when the test is killed.
"""

import ctypes
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | (1 << 18)
_is_private = False


def _leave_the_hosts_mounts() -> None:
    """Once a process: from here on a mount is seen by this thread and its children only."""
    global _is_private
    if _is_private:
        return
    if _libc.unshare(_CLONE_NEWNS) != 0 or _libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) != 0:
        pytest.skip(f"no mount namespace of its own: {os.strerror(ctypes.get_errno())}")
    _is_private = True


class SmallDisk:
    """A filesystem of a few MiB at `path`."""

    def __init__(self, path: Path, kind: str, num_mib: int) -> None:
        self.path = path
        self._filler = path / "filler"
        if os.geteuid() != 0:
            pytest.skip("only root may mount a small filesystem")
        _leave_the_hosts_mounts()
        path.mkdir(parents=True)
        if kind == "tmpfs":
            self._mount("-t", "tmpfs", "-o", f"size={num_mib}m", "tmpfs")
            return
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4 (package e2fsprogs)")
        image = path.with_name(f"{path.name}.image")
        with image.open("wb") as file:
            file.truncate(num_mib * 2**20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        self._mount("-o", "loop", str(image))

    def _mount(self, *arguments: str) -> None:
        done = subprocess.run(["mount", *arguments, self.path], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"mount {' '.join(arguments)}: {done.stderr.strip()}")

    def fill(self) -> None:
        """To the last byte that a file can get."""
        fd = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            for num_bytes in (2**16, 2**12, 2**9, 1):
                try:
                    while True:
                        os.write(fd, b"\0" * num_bytes)
                except OSError as error:
                    assert error.errno == errno.ENOSPC, error
        finally:
            os.close(fd)

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", self.path], check=False)
