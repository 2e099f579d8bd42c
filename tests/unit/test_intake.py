"""What of incoming/ is complete and safe to take: names, the quiet window, order, and what the kernel answers."""

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from retraind.supervisor.intake import STALE_TEMPORARY_SECONDS, Intake, Obstacle, Scan, has_writer, is_temporary

QUIET = 2.0
WALL = 1_764_543_132.0


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    path = tmp_path / "incoming"
    path.mkdir()
    return path


@pytest.fixture
def intake(incoming: Path) -> Intake:
    return Intake(incoming, QUIET)


def put(directory: Path, name: bytes | str, data: bytes = b"1,2\n", mtime_ns: int | None = None) -> bytes:
    path = os.path.join(os.fsencode(directory), os.fsencode(name))
    with open(path, "wb") as file:
        file.write(data)
    if mtime_ns is not None:
        os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def names(scan: Scan) -> list[bytes]:
    return [entry.name for entry in scan.ready]


@pytest.mark.parametrize(
    ("name", "temporary"),
    [
        (b".node.csv.Ab3dEf", True), (b".hidden", True), (b".", True), (b"node.csv~", True), (b"node.csv.tmp", True),
        (b"node.csv.temp", True), (b"node.csv.part", True), (b"node.csv.partial", True), (b"node.csv.filepart", True),
        (b"node.csv.crdownload", True), (b"node.csv.swp", True), (b"node.csv.swx", True), (b"NODE.CSV.TMP", True),
        (b"#node.csv#", True), (b"\xff\xfe.part", True), (b"#", True),
        (b"node.csv", False), (b"node.tmp.csv", False), (b"#node.csv", False), (b"node.csv#", False),
        (b"parts", False), (b"tmp", False), (b"node.parts", False), (b"~node.csv", False), (b"\xff\xfe", False),
        (b"-rf", False), (b" ", False), (b"a" * 255, False),
    ],
)  # fmt: skip
def test_names_of_unfinished_transfers_are_known(name: bytes, *, temporary: bool) -> None:
    assert is_temporary(name) is temporary


def test_a_temporary_name_is_never_ready_and_is_when_it_is_renamed(incoming: Path, intake: Intake) -> None:
    part = put(incoming, "node.csv.part")
    for now in (0.0, 100.0, 10_000.0):
        scan = intake.scan(now, WALL)
        assert (scan.ready, scan.settling, scan.refused, scan.next_due) == ([], [], [], None)
    os.rename(part, incoming / "node.csv")
    intake.scan(10_001.0, WALL)
    assert names(intake.scan(10_003.0, WALL)) == [b"node.csv"]


def test_a_file_is_ready_when_it_was_quiet_for_the_window(incoming: Path, intake: Intake) -> None:
    put(incoming, "node.csv")
    scan = intake.scan(100.0, WALL)
    assert ([entry.name for entry in scan.settling], scan.ready, scan.next_due) == ([b"node.csv"], [], 102.0)
    assert names(intake.scan(101.999, WALL)) == []
    scan = intake.scan(102.0, WALL)
    assert (names(scan), scan.settling, scan.next_due) == ([b"node.csv"], [], None)


@pytest.mark.parametrize("change", ["size", "mtime", "inode"])
def test_every_change_starts_the_window_anew(change: str, incoming: Path, intake: Intake) -> None:
    path = put(incoming, "node.csv", mtime_ns=10**18)
    intake.scan(100.0, WALL)
    match change:
        case "size":
            put(incoming, "node.csv", b"1,2\n3,4\n", mtime_ns=10**18)
        case "mtime":
            os.utime(path, ns=(10**18, 10**18 + 1))
        case "inode":
            os.rename(put(incoming, "other", mtime_ns=10**18), path)
    assert intake.scan(101.0, WALL).next_due == 103.0
    assert names(intake.scan(102.9, WALL)) == []
    assert names(intake.scan(103.0, WALL)) == [b"node.csv"]


def test_a_name_that_went_and_came_back_is_new(incoming: Path, intake: Intake) -> None:
    path = put(incoming, "node.csv", mtime_ns=10**18)
    intake.scan(100.0, WALL)
    aside = incoming.parent / "aside"
    os.rename(path, aside)
    intake.scan(101.0, WALL)
    os.rename(aside, path)
    assert intake.scan(102.0, WALL).next_due == 104.0


def test_a_window_of_zero_takes_a_file_at_once(incoming: Path) -> None:
    put(incoming, "node.csv")
    assert names(Intake(incoming, 0.0).scan(0.0, WALL)) == [b"node.csv"]


def test_a_window_changed_by_a_reload_counts_from_the_last_change(incoming: Path, intake: Intake) -> None:
    put(incoming, "node.csv")
    intake.scan(100.0, WALL)
    intake.quiet_seconds = 10.0
    assert intake.scan(105.0, WALL).next_due == 110.0
    intake.quiet_seconds = 1.0
    assert names(intake.scan(105.0, WALL)) == [b"node.csv"]


def test_the_next_look_is_due_when_the_first_of_many_may_be_ready(incoming: Path, intake: Intake) -> None:
    put(incoming, "a")
    intake.scan(100.0, WALL)
    put(incoming, "b")
    assert intake.scan(101.0, WALL).next_due == 102.0
    scan = intake.scan(102.0, WALL)
    assert (names(scan), scan.next_due) == ([b"a"], 103.0)


def test_the_oldest_is_first_and_the_bytes_of_the_name_decide_between_equals(incoming: Path, intake: Intake) -> None:
    for name, mtime_ns in [(b"c", 5), (b"b", 7), (b"a\xff", 7), (b"a", 7), (b"B", 7), (b"z", 6), (b"\xc3\xa4", 7)]:
        put(incoming, name, mtime_ns=10**18 + mtime_ns)
    intake.scan(0.0, WALL)
    assert names(intake.scan(QUIET, WALL)) == [b"c", b"z", b"B", b"a", b"a\xff", b"b", b"\xc3\xa4"]


@pytest.mark.parametrize("step", [-86_400 * 365 * 60, -3600, 3600, 86_400 * 365 * 60])
def test_steps_of_the_wall_clock_change_nothing(step: float, incoming: Path, intake: Intake) -> None:
    put(incoming, "node.csv", mtime_ns=int((WALL + step) * 10**9))
    intake.scan(100.0, WALL)
    assert names(intake.scan(101.9, WALL + step)) == []
    assert names(intake.scan(102.0, WALL - step)) == [b"node.csv"]


def test_temporary_names_that_nobody_will_finish_are_counted(incoming: Path, intake: Intake) -> None:
    put(incoming, ".old.csv.Ab3dEf", mtime_ns=int((WALL - STALE_TEMPORARY_SECONDS - 1) * 10**9))
    put(incoming, "young.part", mtime_ns=int((WALL - STALE_TEMPORARY_SECONDS + 1) * 10**9))
    assert intake.scan(0.0, WALL).num_stale_temporaries == 1


def test_what_is_no_file_is_refused_once_it_is_quiet(incoming: Path, intake: Intake) -> None:
    (incoming / "directory").mkdir()
    os.mkfifo(incoming / "fifo")
    (incoming / "link").symlink_to("/etc/hostname")
    (incoming / "broken").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as server:
        directory = os.open(incoming, os.O_PATH)
        server.bind(f"/proc/self/fd/{directory}/socket")
        os.close(directory)
    put(incoming, "node.csv")
    scan = intake.scan(0.0, WALL)
    assert (scan.ready, scan.refused, len(scan.settling)) == ([], [], 6)
    scan = intake.scan(QUIET, WALL)
    assert names(scan) == [b"node.csv"]
    assert sorted(entry.name for entry in scan.refused) == [b"broken", b"directory", b"fifo", b"link", b"socket"]


def test_a_directory_that_is_gone_is_the_callers_to_handle(incoming: Path, intake: Intake) -> None:
    incoming.rmdir()
    with pytest.raises(FileNotFoundError):
        intake.scan(0.0, WALL)


def test_a_scan_changes_nothing_on_disk(incoming: Path, intake: Intake) -> None:
    path = put(incoming, "node.csv", mtime_ns=10**18)
    before = os.stat(path)
    intake.scan(0.0, WALL)
    (entry,) = intake.scan(QUIET, WALL).ready
    assert intake.obstacle(entry, QUIET) is None
    after = os.stat(path)
    assert (after.st_mtime_ns, after.st_ctime_ns, after.st_ino) == (
        before.st_mtime_ns,
        before.st_ctime_ns,
        before.st_ino,
    )


def ready_entry(incoming: Path, intake: Intake):
    """One quiet file, as the scan hands it over."""
    put(incoming, "node.csv", mtime_ns=10**18)
    intake.scan(0.0, WALL)
    (entry,) = intake.scan(QUIET, WALL).ready
    return entry


@contextmanager
def writer(path: Path) -> Iterator[None]:
    """Another process that has the file open for writing."""
    code = "import sys\nfile = open(sys.argv[1], 'ab')\nprint(flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield
        process.communicate()


def leases_work(directory: Path) -> bool:
    """Whether this filesystem and this user get leases at all."""
    path = put(directory, "lease-probe")
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def test_a_file_that_another_process_still_writes_is_left_alone(incoming: Path, intake: Intake, tmp_path: Path) -> None:
    if not leases_work(tmp_path):
        pytest.skip("no leases on this filesystem: the quiet window alone decides")
    entry = ready_entry(incoming, intake)
    with writer(incoming / "node.csv"):
        assert intake.obstacle(entry, 10.0) is Obstacle.WRITER
        scan = intake.scan(10.0, WALL)
        assert (names(scan), scan.next_due) == ([], 11.0), "it rests before it is looked at again"
    assert intake.obstacle(entry, 11.0) is None


def test_a_file_that_is_only_read_is_free(incoming: Path, intake: Intake) -> None:
    entry = ready_entry(incoming, intake)
    with (incoming / "node.csv").open("rb"):
        assert intake.obstacle(entry, 10.0) is None


def test_no_lease_is_left_behind(tmp_path: Path) -> None:
    if not leases_work(tmp_path):
        pytest.skip("no leases on this filesystem")
    with open(put(tmp_path, "node.csv"), "rb") as file:
        assert not has_writer(file.fileno())
        assert fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_UNLCK


def test_where_the_kernel_will_not_say_the_window_alone_decides() -> None:
    """A pipe has no leases, as a network filesystem has none."""
    read_fd, write_fd = os.pipe()
    assert not has_writer(read_fd)
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which can become another user")
@pytest.mark.parametrize(("mode", "answer"), [(0o600, "UNREADABLE"), (0o644, "None")])
def test_a_file_of_another_user_is_asked_for_by_opening_it(mode: int, answer: str, incoming: Path) -> None:
    path = put(incoming, "node.csv")
    os.chmod(path, mode)
    incoming.chmod(0o777)
    # Relative to the working directory, since another user does not get through the parents of a test's directory.
    code = (
        "import os\nfrom pathlib import Path\nfrom retraind.supervisor.intake import Intake\n"
        "os.setegid(65534)\nos.seteuid(65534)\nintake = Intake(Path('.'), 0.0)\n"
        "(entry,) = intake.scan(0.0, 0.0).ready\nprint(getattr(intake.obstacle(entry, 0.0), 'name', None))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=incoming, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == answer


@pytest.mark.parametrize(
    ("swap", "obstacle"),
    [
        ("link", Obstacle.CHANGED), ("fifo", Obstacle.CHANGED), ("directory", Obstacle.CHANGED),
        ("socket", Obstacle.CHANGED), ("other file", Obstacle.CHANGED), ("longer", Obstacle.CHANGED),
        ("touched", Obstacle.CHANGED), ("gone", Obstacle.GONE), ("nothing", None),
    ],
)  # fmt: skip
def test_what_happened_between_the_scan_and_the_claim_is_noticed(
    swap: str, obstacle: Obstacle | None, incoming: Path, intake: Intake
) -> None:
    entry = ready_entry(incoming, intake)
    path = incoming / "node.csv"
    if swap in ("link", "fifo", "directory", "socket", "gone", "other file"):
        path.rename(incoming.parent / "aside")  # keeps its inode in use, so that no other file gets the number
    match swap:
        case "link":
            path.symlink_to(incoming.parent / "aside")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                directory = os.open(incoming, os.O_PATH)
                server.bind(f"/proc/self/fd/{directory}/node.csv")
                os.close(directory)
        case "other file":
            put(incoming, "node.csv", mtime_ns=10**18)
        case "longer":
            put(incoming, "node.csv", b"1,2\n3,4\n", mtime_ns=10**18)
        case "touched":
            os.utime(path, ns=(10**18, 10**18 + 1))
    assert intake.obstacle(entry, 10.0) is obstacle
    assert entry.not_before == (0.0 if obstacle is None else 11.0)
