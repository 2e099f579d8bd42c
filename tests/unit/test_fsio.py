"""Durable file operations on a disk that fails: the old content stays whole, nothing is left behind, the error passes.

The fault table is {open, write, short write, fsync, rename, fsync of the directory} x {ENOSPC, EIO}. Promises about a
power cut can not be tested here; that the fsyncs happen, and on what, can.
"""

import ctypes
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import disk_faults
import pytest
from disk_faults import DiskFault, synced

from retraind import fsio

OLD, NEW = b"the old content\n", b"the new content, which is longer\n"
FAULTS = {
    "open": disk_faults.is_file_open,
    "write": disk_faults.is_write,
    "short write": disk_faults.is_write,
    "fsync": disk_faults.is_file_fsync,
    "rename": disk_faults.is_rename,
    "fsync of the directory": disk_faults.is_dir_fsync,
}
MANY = pytest.mark.parametrize("code", disk_faults.CODES.values(), ids=disk_faults.CODES.keys())


@pytest.fixture
def narrow_umask() -> Iterator[None]:
    """The strictest umask that a unit may set: nothing for group and others."""
    old = os.umask(0o077)
    yield
    os.umask(old)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def replace_content(path: Path) -> None:
    fsio.write_atomic(path, NEW)


def replace_volatile(path: Path) -> None:
    fsio.write_volatile(path, NEW)


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.json"
    path.write_bytes(OLD)
    return path


@MANY
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("write", [replace_content, replace_volatile])
def test_a_fault_leaves_whole_content_and_no_temporary_file(
    write: Callable[[Path], None], fault: str, code: int, old_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskFault(code, FAULTS[fault], nth=2 if fault == "short write" else 1)
    with monkeypatch.context() as patch:
        disk.install(patch)
        if fault == "short write":
            disk_faults.write_at_most(5, patch)
        if write is replace_volatile and "fsync" in fault:
            write(old_file)
            assert disk.num_calls == 0, "a volatile write costs no fsync"
        else:
            with pytest.raises(OSError, match=r".") as caught:
                write(old_file)
            assert caught.value is disk.error, "the error passes unchanged"
    # The directory's fsync comes after the rename: by then readers have the new content, and it is whole.
    renamed = disk.num_calls == 0 or fault == "fsync of the directory"
    assert old_file.read_bytes() == (NEW if renamed else OLD)
    assert os.listdir(old_file.parent) == [old_file.name]
    write(old_file)
    assert old_file.read_bytes() == NEW


@MANY
@pytest.mark.parametrize("fault", ["open", "write", "short write", "fsync"])
def test_a_new_file_that_could_not_be_written_whole_is_not_there(
    fault: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskFault(code, FAULTS[fault], nth=2 if fault == "short write" else 1)
    with monkeypatch.context() as patch:
        disk.install(patch)
        if fault == "short write":
            disk_faults.write_at_most(5, patch)
        with pytest.raises(OSError, match=r".") as caught:
            fsio.write_new(tmp_path / "weights.pt", NEW)
    assert caught.value is disk.error
    assert os.listdir(tmp_path) == []


@MANY
def test_a_link_that_could_not_be_swapped_points_where_it_did(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "current"
    fsio.replace_link(link, "versions/1")
    for fault in (lambda name, _args: name == "symlink", disk_faults.is_rename):
        disk = DiskFault(code, fault)
        with monkeypatch.context() as patch:
            disk.install(patch)
            with pytest.raises(OSError, match=r".") as caught:
                fsio.replace_link(link, "versions/2")
        assert caught.value is disk.error
        assert os.readlink(link) == "versions/1"
        assert os.listdir(tmp_path) == ["current"]
    fsio.replace_link(link, "versions/2")
    assert os.readlink(link) == "versions/2"


@pytest.mark.parametrize("write", [fsio.write_new, fsio.write_atomic, fsio.write_volatile])
def test_short_writes_are_carried_on_with(
    write: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        disk_faults.write_at_most(3, patch)
        write(tmp_path / "file", NEW)
    assert (tmp_path / "file").read_bytes() == NEW


def test_an_atomic_write_syncs_the_file_and_then_its_directory(old_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = synced(monkeypatch, lambda: fsio.write_atomic(old_file, NEW))
    assert paths == [str(old_file.with_name(".job.json.tmp")), str(old_file.parent)]


def test_a_move_syncs_both_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    (tmp_path / "from" / "a").write_bytes(OLD)
    paths = synced(
        monkeypatch, lambda: fsio.move(os.fsencode(tmp_path / "from" / "a"), os.fsencode(tmp_path / "to" / "a"))
    )
    assert paths == [str(tmp_path / "to"), str(tmp_path / "from")]


@pytest.mark.usefixtures("narrow_umask")
@pytest.mark.parametrize("mode", [0o444, 0o640, 0o644, 0o666])
def test_the_umask_does_not_change_a_files_mode(mode: int, tmp_path: Path) -> None:
    for write in (fsio.write_new, fsio.write_atomic, fsio.write_volatile):
        path = tmp_path / write.__name__
        write(path, NEW, mode=mode)
        assert mode_of(path) == mode


@pytest.mark.usefixtures("narrow_umask")
@pytest.mark.parametrize("mode", [0o755, 0o3730, 0o2750])
def test_the_umask_does_not_change_a_directorys_mode(mode: int, tmp_path: Path) -> None:
    fsio.make_dir(tmp_path / "a" / "b", mode)
    assert mode_of(tmp_path / "a" / "b") == mode


def test_a_directory_that_is_there_keeps_its_mode_and_content(tmp_path: Path) -> None:
    path = tmp_path / "incoming"
    path.mkdir()
    path.chmod(0o710)
    (path / "a").write_bytes(OLD)
    fsio.make_dir(path, 0o755)
    assert mode_of(path) == 0o710
    assert os.listdir(path) == ["a"]


@MANY
def test_a_directory_is_there_with_its_mode_or_not_at_all(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spool" / "incoming"
    for nth in range(1, 100):
        disk = DiskFault(code, disk_faults.any_change, nth)
        with monkeypatch.context() as patch:
            disk.install(patch)
            with suppress(OSError):
                fsio.make_dir(path, 0o3730)
        if not disk.failed_at:
            break
        assert not path.exists(), f"a directory whose {disk.failed_at} failed would be believed the next time"
        assert list(tmp_path.rglob(".*")) == []
    assert nth > 4
    assert mode_of(path) == 0o3730


def test_a_new_directory_and_its_parents_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = synced(monkeypatch, lambda: fsio.make_dir(tmp_path / "a" / "b", 0o755))
    root = str(tmp_path)
    assert paths == [f"{root}/.a.tmp", root, f"{root}/a/.b.tmp", f"{root}/a"]


def test_a_directory_that_a_crash_left_half_made_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".incoming.tmp").mkdir()
    fsio.make_dir(tmp_path / "incoming", 0o3730)
    assert os.listdir(tmp_path) == ["incoming"]
    assert mode_of(tmp_path / "incoming") == 0o3730


def test_a_file_in_the_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "incoming").write_bytes(OLD)
    with pytest.raises(FileExistsError):
        fsio.make_dir(tmp_path / "incoming", 0o755)


def test_a_new_file_never_replaces_another(old_file: Path) -> None:
    with pytest.raises(FileExistsError):
        fsio.write_new(old_file, NEW)
    assert old_file.read_bytes() == OLD


@pytest.mark.parametrize("write", [fsio.write_atomic, fsio.write_volatile])
def test_what_a_crash_left_under_the_temporary_name_is_in_nobodys_way(
    write: Callable[[Path, bytes], None], old_file: Path, tmp_path: Path
) -> None:
    temporary = old_file.with_name(f".{old_file.name}.tmp")
    temporary.write_bytes(b"half of someth")
    write(old_file, NEW)
    victim = tmp_path / "victim"
    victim.write_bytes(OLD)
    temporary.symlink_to(victim)
    write(old_file, NEW)
    assert old_file.read_bytes() == NEW
    assert victim.read_bytes() == OLD, "a planted link is not followed"
    assert sorted(os.listdir(tmp_path)) == [old_file.name, "victim"]


def test_a_reader_that_has_the_old_file_open_keeps_it(old_file: Path) -> None:
    with old_file.open("rb") as file:
        fsio.write_atomic(old_file, NEW)
        assert file.read() == OLD


@pytest.fixture(params=["renameat2", "EINVAL", "ENOSYS"])
def rename_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel's exclusive rename, and a filesystem or a kernel that does not have it."""
    if request.param != "renameat2":

        class Libc:
            def renameat2(self, *_: object) -> int:
                ctypes.set_errno(getattr(errno, request.param))
                return -1

        monkeypatch.setattr(fsio, "_libc", Libc())
    return str(request.param)


@pytest.mark.usefixtures("rename_kind")
def test_a_move_never_overwrites(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(NEW)
    for make in (lambda: target.write_bytes(OLD), target.mkdir, lambda: target.symlink_to("nowhere")):
        make()
        with pytest.raises(FileExistsError):
            fsio.move(os.fsencode(source), os.fsencode(target))
        assert source.read_bytes() == NEW
        target.rmdir() if target.is_dir() else target.unlink()
    fsio.move(os.fsencode(source), os.fsencode(target))
    assert target.read_bytes() == NEW
    assert not source.exists()


@pytest.mark.usefixtures("rename_kind")
def test_a_move_of_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        fsio.move(os.fsencode(tmp_path / "a"), os.fsencode(tmp_path / "b"))
    assert caught.value.filename in (str(tmp_path / "a"), os.fsencode(tmp_path / "a"))


def test_a_name_is_bytes_and_stays_so(tmp_path: Path) -> None:
    name = bytes(byte for byte in range(1, 256) if byte != ord("/"))[:200]
    source = os.path.join(os.fsencode(tmp_path), name)
    Path(os.fsdecode(source)).write_bytes(NEW)
    fsio.move(source, source + b"2")
    assert os.listdir(os.fsencode(tmp_path)) == [name + b"2"]


def test_a_move_across_filesystems_is_refused_and_copies_nothing(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second filesystem at /dev/shm")
    source, target = tmp_path / "a", shm / f"retraind-test-{os.getpid()}"
    source.write_bytes(NEW)
    with pytest.raises(OSError, match="cross-device") as caught:
        fsio.move(os.fsencode(source), os.fsencode(target))
    assert caught.value.errno == errno.EXDEV
    assert source.read_bytes() == NEW
    assert not target.exists()


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1])
def test_the_digest_is_of_all_bytes(size: int, tmp_path: Path) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    path = tmp_path / "file"
    path.write_bytes(data)
    assert fsio.sha256_of(path) == fsio.sha256_of_bytes(data) == hashlib.sha256(data).hexdigest()
