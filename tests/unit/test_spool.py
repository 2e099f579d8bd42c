"""The spool's directories as states: each file in exactly one, under a name that nobody loses, its reason beside it."""

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import JOB_ID, OTHER_ID

from retraind import fsio
from retraind.errors import HostError
from retraind.job import Reason
from retraind.printable import printable
from retraind.supervisor.spool import ReasonFile, Spool, Usage, count, read_reason

DATA = b"cpu,load\n1,2\n"
REASON = Reason(code="malformed", message="no number: 'x'", line=3, column=2, remedy="look at line 3")
NAMES = [
    b"node-42.csv",
    b"no-extension",
    b"many.dots.csv.gz",
    b"with space and 'quotes' \"too\".csv",
    b"-rf",
    b"\xff\xfe\x80.csv",
    b"new\nline\ttab.csv",
    b"\xf0\x9f\x92\xbe.csv",
    b"a" * 255,
    b"a" * 251 + b".csv",
    b"a." + b"b" * 253,
    b"\xc3\xa4" * 127,
    b"x.reason.json",
]
BY_NAME = pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:24]))


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path / "spool")
    spool.open()
    return spool


def drop(spool: Spool, name: bytes = b"node-42.csv", data: bytes = DATA) -> bytes:
    path = os.path.join(os.fsencode(spool.incoming), name)
    with open(path, "wb") as file:
        file.write(data)
    return path


def claim(spool: Spool, name: bytes = b"node-42.csv", job_id: str = JOB_ID, data: bytes = DATA) -> None:
    drop(spool, name, data)
    spool.claim(name, job_id)


def quarantine(spool: Spool, job_id: str = JOB_ID) -> None:
    spool.quarantine(job_id, REASON, sha256="ab" * 32, attempts=1)


def listing(directory: Path) -> dict[bytes, bytes]:
    """The data files of a directory and their content."""
    found = {}
    for name in os.listdir(os.fsencode(directory)):
        path = os.path.join(os.fsencode(directory), name)
        with open(path, "rb") as file:
            found[name] = file.read()
    return found


def data_files(directory: Path) -> dict[bytes, bytes]:
    return {name: data for name, data in listing(directory).items() if data[:1] != b"{"}


def contents(spool: Spool) -> list[bytes]:
    """Every dataset anywhere in the spool."""
    found = []
    for directory in (spool.incoming, spool.done, spool.quarantined, *spool.active.iterdir()):
        found += data_files(directory).values()
    return sorted(found)


def test_a_new_spool_lets_producers_add_and_nothing_else(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        Spool(tmp_path / "spool").open()
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "spool").iterdir() if path.is_dir()}
    assert modes == {"incoming": 0o3730, "active": 0o2750, "done": 0o2750, "quarantine": 0o2750}


def test_opening_a_spool_again_changes_nothing(spool: Spool) -> None:
    claim(spool)
    spool.incoming.chmod(0o3770)
    spool.open()
    assert stat.S_IMODE(spool.incoming.stat().st_mode) == 0o3770
    assert contents(spool) == [DATA]


@BY_NAME
def test_a_claim_takes_the_file_with_its_name_and_bytes(name: bytes, spool: Spool) -> None:
    claim(spool, name)
    assert listing(spool.incoming) == {}
    assert listing(spool.active / JOB_ID) == {name: DATA}
    assert spool.dataset(JOB_ID) == os.path.join(os.fsencode(spool.active / JOB_ID), name)
    assert spool.claimed() == [JOB_ID]


def test_a_claim_of_what_is_gone_says_so_and_can_be_released(spool: Spool) -> None:
    with pytest.raises(FileNotFoundError):
        spool.claim(b"gone.csv", JOB_ID)
    spool.release(JOB_ID)
    assert spool.claimed() == []


def test_a_claim_never_overwrites(spool: Spool) -> None:
    claim(spool, data=b"first")
    drop(spool, data=b"second")
    with pytest.raises(FileExistsError):
        spool.claim(b"node-42.csv", JOB_ID)
    assert contents(spool) == [b"first", b"second"]


@BY_NAME
def test_an_archived_file_keeps_its_bytes(name: bytes, spool: Spool) -> None:
    claim(spool, name)
    spool.archive(JOB_ID)
    (archived,) = listing(spool.done)
    assert listing(spool.done)[archived] == DATA
    assert spool.claimed() == []
    if len(name) < 200:
        assert archived == name


def test_a_taken_name_gets_the_jobs_id_before_its_extension(spool: Spool) -> None:
    for number, job_id in enumerate((JOB_ID, OTHER_ID)):
        claim(spool, b"node.csv.gz", job_id, b"%d" % number)
        spool.archive(job_id)
    assert listing(spool.done) == {b"node.csv.gz": b"0", f"node.{OTHER_ID}.csv.gz".encode(): b"1"}


def test_when_no_name_is_free_the_file_stays_claimed(spool: Spool) -> None:
    claim(spool, b"node.csv")
    for name in ("node.csv", f"node.{JOB_ID}.csv"):
        (spool.done / name).write_bytes(b"other")
    with pytest.raises(FileExistsError, match=r"node\.csv"):
        spool.archive(JOB_ID)
    assert listing(spool.active / JOB_ID) == {b"node.csv": DATA}
    assert set(listing(spool.done).values()) == {b"other"}


@pytest.mark.parametrize("step", [Spool.archive, quarantine, Spool.give_back])
def test_a_step_repeated_after_it_is_done_changes_nothing(step: Callable[..., None], spool: Spool) -> None:
    claim(spool)
    step(spool, JOB_ID)
    before = contents(spool)
    step(spool, JOB_ID)
    assert contents(spool) == before == [DATA]
    assert spool.claimed() == []


@BY_NAME
def test_a_quarantined_file_has_its_reason_beside_it(name: bytes, spool: Spool) -> None:
    claim(spool, name)
    quarantine(spool)
    ((kept, data),) = data_files(spool.quarantined).items()
    assert data == DATA
    path = os.path.join(os.fsencode(spool.quarantined), kept)
    with open(path + b".reason.json", "rb") as file:
        note = json.loads(file.read())
    assert note == {
        "code": "malformed", "message": "no number: 'x'", "line": 3, "column": 2, "remedy": "look at line 3",
        "sha256": "ab" * 32, "attempts": 1, "job": JOB_ID,
    }  # fmt: skip
    assert stat.S_IMODE(os.stat(path + b".reason.json").st_mode) == 0o640
    assert spool.in_quarantine() == {JOB_ID: path}
    assert len(listing(spool.quarantined)) == 2


def test_the_reason_is_written_before_the_file_is_moved_and_goes_when_it_is_not(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(spool)
    full = OSError(errno.EIO, os.strerror(errno.EIO))
    notes = []

    def fail(_source: bytes, target: bytes) -> None:
        notes.append(read_reason(target + b".reason.json"))
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "move", fail)
        with pytest.raises(OSError, match=r".") as caught:
            quarantine(spool)
    assert caught.value is full
    assert listing(spool.active / JOB_ID) == {b"node-42.csv": DATA}
    assert [isinstance(note, ReasonFile) and note.job for note in notes] == [JOB_ID]
    assert os.listdir(spool.quarantined) == []  # nor is a reason left without its file
    quarantine(spool)  # as recovery does
    assert set(listing(spool.quarantined)) == {b"node-42.csv", b"node-42.csv.reason.json"}
    assert spool.claimed() == []


def test_two_bad_files_of_one_name_keep_their_own_reasons(spool: Spool) -> None:
    for job_id in (JOB_ID, OTHER_ID):
        claim(spool, b"node.csv", job_id, job_id.encode())
        quarantine(spool, job_id)
    found = spool.in_quarantine()
    assert set(found) == {JOB_ID, OTHER_ID}
    for job_id, path in found.items():
        assert Path(os.fsdecode(path)).read_bytes() == job_id.encode()


@pytest.mark.parametrize("order", [(b"node.csv", b"node.csv.reason.json"), (b"node.csv.reason.json", b"node.csv")])
def test_a_dataset_named_like_a_reason_file_and_a_reason_file_do_not_meet(
    order: tuple[bytes, bytes], spool: Spool
) -> None:
    for name, job_id in zip(order, (JOB_ID, OTHER_ID), strict=True):
        claim(spool, name, job_id, name)
        quarantine(spool, job_id)
    found = spool.in_quarantine()
    assert {Path(os.fsdecode(path)).read_bytes() for path in found.values()} == set(order)
    assert len(listing(spool.quarantined)) == 4


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_what_is_no_file_is_moved_and_not_followed(kind: str, spool: Spool, tmp_path: Path) -> None:
    path = spool.incoming / "thing"
    victim = tmp_path / "victim"
    victim.write_bytes(DATA)
    {"fifo": lambda: os.mkfifo(path), "directory": path.mkdir, "link": lambda: path.symlink_to(victim)}[kind]()
    spool.refuse(b"thing", JOB_ID, Reason(code="not_regular", message="thing is not a regular file"))
    moved = spool.quarantined / "thing"
    assert moved.lstat()
    assert (moved.is_symlink(), moved.is_dir(), moved.is_fifo()) == (
        kind == "link",
        kind == "directory",
        kind == "fifo",
    )
    assert victim.read_bytes() == DATA
    note = read_reason(os.fsencode(spool.quarantined / "thing.reason.json"))
    assert note == ReasonFile(
        code="not_regular", message="thing is not a regular file", line=None, column=None, remedy="", sha256="",
        attempts=0, job=JOB_ID,
    )  # fmt: skip


@BY_NAME
def test_a_requeued_file_goes_back_and_its_reason_goes(name: bytes, spool: Spool) -> None:
    claim(spool, name)
    quarantine(spool)
    told = spool.requeue(spool.in_quarantine()[JOB_ID], OTHER_ID)
    ((back, data),) = listing(spool.incoming).items()
    assert data == DATA
    assert told == printable(back)
    assert listing(spool.quarantined) == {}


def test_a_requeued_file_does_not_replace_one_that_waits(spool: Spool) -> None:
    claim(spool, data=b"old")
    quarantine(spool)
    drop(spool, data=b"new")
    assert spool.requeue(spool.in_quarantine()[JOB_ID], JOB_ID) == f"node-42.{JOB_ID}.csv"
    assert listing(spool.incoming) == {b"node-42.csv": b"new", f"node-42.{JOB_ID}.csv".encode(): b"old"}


def test_a_file_that_was_written_to_goes_back_as_a_new_one(spool: Spool) -> None:
    claim(spool, data=b"old")
    drop(spool, data=b"new")
    spool.give_back(JOB_ID)
    assert sorted(listing(spool.incoming).values()) == [b"new", b"old"]
    assert spool.claimed() == []


def test_a_damaged_reason_file_is_passed_over(spool: Spool) -> None:
    (spool.quarantined / "a.csv").write_bytes(DATA)
    (spool.quarantined / "a.csv.reason.json").write_bytes(b'{"code": ')
    assert spool.in_quarantine() == {}
    assert read_reason(b"/nonexistent.reason.json") is None


def test_usage_counts_data_and_not_what_lies_beside_it(spool: Spool) -> None:
    assert spool.usage(spool.quarantined) == Usage()
    for job_id, data in ((JOB_ID, b"12345"), (OTHER_ID, b"123")):
        claim(spool, job_id.encode(), job_id, data)
        quarantine(spool, job_id)
    os.utime(spool.quarantined / JOB_ID, (1000, 1000))
    (spool.quarantined / ".hidden").write_bytes(DATA)
    (spool.quarantined / "link").symlink_to("/etc/passwd")
    assert count(spool.quarantined) == Usage(num_files=3, num_bytes=8, oldest=1000.0)


def test_usage_follows_the_directory(spool: Spool) -> None:
    assert spool.usage(spool.done).num_files == 0
    claim(spool)
    spool.archive(JOB_ID)
    assert spool.usage(spool.done) == count(spool.done)
    assert spool.usage(spool.done).num_files == 1


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (b"node-42.csv", "node-42.csv"), (b"\xff.csv", "\\xff.csv"), (b"a\nb\x1b[31m", "a\\nb\\x1b[31m"),
        ("\u00e4\u2028".encode(), "\u00e4\\u2028"), (b"", ""),
    ],
)  # fmt: skip
def test_a_label_is_one_line_of_text_whatever_the_bytes(name: bytes, label: str) -> None:
    assert printable(name) == label


def test_a_spool_on_two_filesystems_is_refused(tmp_path: Path, spool: Spool) -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second filesystem at /dev/shm")
    spool.done.rmdir()
    spool.done.symlink_to(shm)
    with pytest.raises(HostError, match="spans 2 filesystems") as caught:
        spool.check()
    assert caught.value.code == "spool_unusable"


def mounted(target: Path) -> bool:
    done = subprocess.run(["mount", "-t", "tmpfs", "none", str(target)], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def mount_point(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs where done/ of a spool belongs."""
    path = tmp_path / "spool" / "done"
    path.mkdir(parents=True)
    try:
        is_mounted = mounted(path)
    except FileNotFoundError:
        is_mounted = False
    if not is_mounted:
        pytest.skip("no tmpfs can be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.usefixtures("mount_point")
def test_a_mount_in_the_middle_of_the_spool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="spans 2 filesystems"):
        Spool(tmp_path / "spool").open()


def test_a_spool_that_can_not_be_made_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "spool").write_bytes(b"a file is in the way")
    with pytest.raises(HostError, match="check spool.dir") as caught:
        Spool(tmp_path / "spool").open()
    assert caught.value.code == "spool_unusable"


@pytest.mark.parametrize("name", ["incoming", "active", "done", "quarantine"])
def test_a_directory_that_is_gone_is_named(name: str, spool: Spool) -> None:
    (spool.root / name).rmdir()
    with pytest.raises(HostError, match=f"{name}: No such file") as caught:
        spool.check()
    assert caught.value.code == "spool_unusable"


def test_a_second_service_does_not_get_the_spool(spool: Spool) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom retraind.errors import HostError\n"
        "from retraind.supervisor.spool import Spool\n"
        "try:\n    Spool(Path(sys.argv[1])).open()\nexcept HostError as error:\n    print(error.code)"
    )
    command = [sys.executable, "-c", code, str(spool.root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "already_running"


def test_a_reason_whose_file_never_came_is_gone_at_the_next_start_and_that_of_an_open_claim_stays(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service was killed between the two steps of a refusal, and of a quarantine."""
    reason = Reason(code="not_regular", message="pipe is not a regular file")
    os.mkfifo(spool.incoming / "pipe")
    (spool.incoming / "bad.csv").write_text("rows")
    spool.claim(b"bad.csv", JOB_ID)
    with monkeypatch.context() as patch:
        patch.setattr(fsio, "move", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        for step in (
            lambda: spool.refuse(b"pipe", OTHER_ID, reason),
            lambda: spool.quarantine(JOB_ID, reason, sha256="", attempts=1),
        ):
            with pytest.raises(KeyboardInterrupt):
                step()
    spool.open()
    assert sorted(path.name for path in spool.quarantined.iterdir()) == ["bad.csv.reason.json"]
    spool.refuse(b"pipe", OTHER_ID, reason)
    spool.quarantine(JOB_ID, reason, sha256="", attempts=1)
    names = sorted(path.name for path in spool.quarantined.iterdir())
    assert names == ["bad.csv", "bad.csv.reason.json", "pipe", "pipe.reason.json"]


def test_a_reason_half_written_is_gone_at_the_next_start_and_other_hidden_files_stay(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name was taken, so the refusal wrote under one with its job's id, which no later refusal has."""
    (spool.quarantined / "pipe").write_text("an earlier one")
    (spool.quarantined / ".kept").write_text("an operator's")
    os.mkfifo(spool.incoming / "pipe")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a kill takes nothing back
        with pytest.raises(KeyboardInterrupt):
            spool.refuse(b"pipe", OTHER_ID, Reason(code="not_regular", message="pipe is not a regular file"))
    assert f".pipe.{OTHER_ID}.reason.json.tmp" in os.listdir(spool.quarantined)
    spool.open()
    assert sorted(os.listdir(spool.quarantined)) == [".kept", "pipe"]
