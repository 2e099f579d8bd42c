"""Locks against real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from retraind import locks
from retraind.errors import HostError
from retraind.locks import is_locked, take_lock

_HOLDER = """
import sys
from pathlib import Path
from retraind.locks import take_lock
take_lock(Path(sys.argv[1]), "it")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_of_another_process_is_refused_and_free_again_when_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_locked(path)
        with pytest.raises(HostError, match="the spool is held by another process") as caught:
            take_lock(path, "the spool")
        assert caught.value.code == "already_running"
        holder.kill()
    assert not is_locked(path)
    take_lock(path, "the spool")


def test_looking_at_a_lock_never_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    assert not is_locked(path)
    assert path not in locks._held
    take_lock(path, "it")
    take_lock(path, "it")
    assert is_locked(path), "also the process's own lock is seen"


def test_what_is_not_there_is_not_locked(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert not is_locked(tmp_path / "link")
    with pytest.raises(OSError, match="symbolic links"):
        take_lock(tmp_path / "link", "it")
