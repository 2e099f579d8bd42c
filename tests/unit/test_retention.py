"""What is removed from done/: the files that came first, as many as the limits say, and never anything else."""

import dataclasses
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from retraind.config import SpoolConfig
from retraind.supervisor import retention
from retraind.supervisor.metrics import Metrics
from retraind.supervisor.retention import Archived, Retention, surplus
from retraind.supervisor.spool import Spool

SEED = 20261201
DAY_NS = 86_400 * 10**9
NOW_NS = 1_000 * DAY_NS
FILES = [Archived(NOW_NS - days * DAY_NS, f"{days}.csv", size, days) for days, size in ((9, 5), (5, 3), (2, 4), (0, 1))]
NOTHING = SpoolConfig()


def days(number: float) -> SpoolConfig:
    return SpoolConfig(done_max_age_days=number)


def size(number: int) -> SpoolConfig:
    return SpoolConfig(done_max_bytes=number)


@pytest.mark.parametrize(
    ("limits", "keep_ns", "num_gone"),
    [
        (NOTHING, None, 0),
        (days(10), None, 0),
        (days(9), None, 0),  # as old as the limit is not older
        (days(8.9), None, 1),
        (days(1), None, 3),
        (days(0.001), None, 3),
        (size(13), None, 0),
        (size(12), None, 1),
        (size(8), None, 1),
        (size(7), None, 2),
        (size(1), None, 3),
        (SpoolConfig(done_max_age_days=4, done_max_bytes=12), None, 2),
        (SpoolConfig(done_max_age_days=8, done_max_bytes=1), None, 3),
        (size(1), NOW_NS - 5 * DAY_NS, 1),  # the second came when the oldest job that is not filed was made
        (days(1), NOW_NS - 20 * DAY_NS, 0),
        (size(1), NOW_NS + DAY_NS, 3),
    ],
)
def test_the_oldest_go_until_the_limits_hold(limits: SpoolConfig, keep_ns: int | None, num_gone: int) -> None:
    assert surplus(FILES, 13, limits, NOW_NS, keep_ns) == FILES[:num_gone]


def test_a_clock_that_went_back_makes_nothing_old() -> None:
    assert surplus(FILES, 13, days(0.001), 0) == []


def test_a_file_larger_than_the_limit_goes_even_when_it_is_the_only_one() -> None:
    assert surplus(FILES[:1], 5, size(4), NOW_NS) == FILES[:1]


class Swept:
    """A spool whose done/ is swept until nothing more is due; the clocks are the test's."""

    def __init__(self, root: Path) -> None:
        self.spool, self.metrics = Spool(root), Metrics()
        self.spool.open()
        self.retention = Retention(self.spool.done, self.metrics)
        self.now = 0.0

    def turn(self, limits: SpoolConfig, *, ahead_days: float = 0.0, keep_ns: int | None = None) -> None:
        self.now = max(self.now, self.retention.due_at)
        self.retention.look(self.now, time.time_ns() + int(ahead_days * DAY_NS), limits, keep_ns)

    def sweep(self, limits: SpoolConfig, *, ahead_days: float = 0.0, keep_ns: int | None = None) -> None:
        for _ in range(1000):
            self.turn(limits, ahead_days=ahead_days, keep_ns=keep_ns)
            if self.retention._fd < 0 and not self.retention._is_cut:
                return
        raise AssertionError("a sweep without an end")

    def removed(self) -> tuple[float, float]:
        value = self.metrics.registry.get_sample_value
        return value("retraind_done_removed_files_total"), value("retraind_done_removed_bytes_total")


@pytest.fixture
def swept(tmp_path: Path) -> Iterator[Swept]:
    made = Swept(tmp_path / "spool")
    yield made
    made.retention.close()


def arrive(directory: Path, name: str, data: bytes) -> None:
    """As a claim is archived: written elsewhere, of any age, then renamed. The ctimes differ from file to file."""
    staged = directory.parent / "staged"
    staged.write_bytes(data)
    os.utime(staged, (1, 1))
    target = directory / name
    staged.rename(target)
    ctime = target.lstat().st_ctime_ns
    while time.time_ns() // 10_000_000 <= ctime // 10_000_000:  # a tick of the clock by which a kernel stamps files
        pass


def everything(root: Path) -> dict[str, object]:
    """Each name below a directory with what it is."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else path.lstat().st_mode
        found[str(path.relative_to(root))] = kind
    return found


def surround(spool: Spool, outside: Path) -> None:
    """What must stay: everything that is no plain file of done/ itself."""
    for directory in (spool.incoming, spool.quarantined, spool.root, outside, spool.done / "directory"):
        directory.mkdir(exist_ok=True)
        (directory / "kept.csv").write_bytes(b"kept" * 100)
    (spool.active / "20261130T225212Z-1f3a").mkdir()
    (spool.active / "20261130T225212Z-1f3a" / "kept.csv").write_bytes(b"kept" * 100)
    (spool.quarantined / "kept.csv.reason.json").write_text("{}")
    (spool.done / "link-to-a-file").symlink_to(outside / "kept.csv")
    (spool.done / "link-to-a-directory").symlink_to(outside)
    (spool.done / "link-to-nothing").symlink_to(outside / "nothing")
    os.mkfifo(spool.done / "fifo")
    (spool.done / ".hidden").write_bytes(b"hidden" * 100)


@pytest.mark.parametrize("by", ["age", "bytes"])
def test_what_goes_is_what_the_limits_say_and_nothing_else_of_the_spool_is_touched(
    by: str, swept: Swept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty plain files in a random order of names, sizes and slices; the later half is to stay."""
    dice = random.Random(SEED)
    monkeypatch.setattr(retention, "_REMOVED_A_LOOK", dice.randint(1, 7))
    monkeypatch.setattr(retention, "_LISTED_A_LOOK", dice.randint(1, 11))
    monkeypatch.setattr(retention, "_REMEMBERED", dice.randint(3, 9))
    surround(swept.spool, tmp_path / "outside")
    kept = everything(tmp_path)
    names = [f"{number}.csv" for number in range(38)] + ["x.reason.json", os.fsdecode(b"\xff.csv")]
    dice.shuffle(names)
    data = {name: dice.randbytes(dice.randint(0, 50)) for name in names}
    for name in names:
        arrive(swept.spool.done, name, data[name])
    young = names[20:]
    first = (swept.spool.done / young[0]).lstat().st_ctime_ns
    limits = size(sum(len(data[name]) for name in young))
    if by == "age":
        limits = days(1)
        monkeypatch.setattr(time, "time_ns", lambda: first)  # so the first of the young is exactly as old as the limit
    swept.sweep(limits, ahead_days=1)
    left = {name for name in data if (swept.spool.done / name).exists()}
    assert set(young) <= left
    # An empty file that is the oldest one left is in nobody's way where bytes count.
    assert all(data[name] == b"" for name in left - set(young))
    assert by == "bytes" or left == set(young)
    gone = [name for name in data if name not in left]
    assert swept.removed() == (len(gone), sum(len(data[name]) for name in gone))
    now = everything(tmp_path)
    assert {path: now[path] for path in kept} == kept
    assert {path.rpartition("/")[2]: now[path] for path in now.keys() - kept.keys()} == {n: data[n] for n in left}


def test_without_limits_nothing_is_ever_looked_at(swept: Swept) -> None:
    arrive(swept.spool.done, "a.csv", b"a")
    swept.turn(NOTHING, ahead_days=36_500)
    assert swept.retention.due_at == float("inf")
    assert (swept.spool.done / "a.csv").exists()


def test_the_age_is_that_of_the_move_and_not_what_the_producer_says(swept: Swept) -> None:
    arrive(swept.spool.done, "a.csv", b"a")
    assert (swept.spool.done / "a.csv").stat().st_mtime == 1
    swept.sweep(days(1), ahead_days=0.9)
    assert (swept.spool.done / "a.csv").exists()
    swept.now += 3600
    swept.sweep(days(1), ahead_days=1.1)
    assert not (swept.spool.done / "a.csv").exists()


def test_a_look_removes_a_bounded_number(swept: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_REMOVED_A_LOOK", 3)
    for number in range(8):
        (swept.spool.done / f"{number}.csv").write_bytes(b"x")
    left = []
    for _ in range(3):
        swept.turn(days(1), ahead_days=2)
        left.append(len(list(swept.spool.done.iterdir())))
    assert left == [5, 2, 0]


def test_new_limits_end_what_the_old_ones_began(swept: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_REMOVED_A_LOOK", 1)
    for number in range(5):
        (swept.spool.done / f"{number}.csv").write_bytes(b"x")
    swept.turn(days(1), ahead_days=2)
    swept.sweep(days(3), ahead_days=2)
    assert len(list(swept.spool.done.iterdir())) == 4


def _replace_directory(done: Path) -> None:
    done.rename(done.with_name("kept-by-the-operator"))
    done.mkdir()


def _rewrite(done: Path) -> None:
    for path in done.iterdir():
        path.write_bytes(b"another content")


def _turn_into_links(done: Path) -> None:
    (done.parent / "away").mkdir()
    for path in list(done.iterdir()):
        path.rename(done.parent / "away" / path.name)
        path.symlink_to(done.parent / "away" / path.name)


@pytest.mark.parametrize("change", [_replace_directory, _rewrite, _turn_into_links])
def test_what_changed_after_it_was_chosen_stays(
    change: Callable[[Path], None], swept: Swept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_REMOVED_A_LOOK", 1)
    for number in range(5):
        arrive(swept.spool.done, f"{number}.csv", b"x")
    swept.turn(days(1), ahead_days=2)
    assert len(list(swept.spool.done.iterdir())) == 4
    change(swept.spool.done)
    before = everything(swept.spool.root)
    swept.turn(days(1), ahead_days=2)  # the rest of what was chosen before
    assert everything(swept.spool.root) == before
    assert swept.removed()[0] == 1


def test_a_link_in_the_place_of_done_is_not_followed(
    swept: Swept, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(swept.spool.done)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "a.csv").write_bytes(b"a")
    swept.spool.done.symlink_to(tmp_path / "precious")
    for _ in range(3):
        swept.turn(days(1), ahead_days=2)
    assert (tmp_path / "precious" / "a.csv").exists()
    assert len(caplog.records) == 1, "said once"


def test_what_a_link_leads_to_does_not_count_as_bytes_of_done(swept: Swept, tmp_path: Path) -> None:
    arrive(swept.spool.done, "a.csv", b"0123456789")
    (tmp_path / "large").write_bytes(bytes(1000))
    (swept.spool.done / "link").symlink_to(tmp_path / "large")
    swept.sweep(size(10))
    assert (swept.spool.done / "a.csv").exists()


def test_a_directory_that_is_gone_is_waited_for(swept: Swept) -> None:
    shutil.rmtree(swept.spool.done)
    swept.turn(days(1))
    swept.spool.done.mkdir()
    (swept.spool.done / "a.csv").write_bytes(b"a")
    swept.sweep(days(1), ahead_days=2)
    assert swept.removed() == (1, 1)


def test_a_file_that_comes_after_a_sweep_is_seen_soon(swept: Swept) -> None:
    swept.sweep(size(3))
    arrive(swept.spool.done, "a.csv", b"four")
    swept.now += 5
    swept.retention.look(swept.now, time.time_ns(), size(3), None)
    assert swept.removed() == (1, 4)


def test_a_file_has_every_field_that_tells_it_from_another() -> None:
    assert [field.name for field in dataclasses.fields(Archived)] == ["arrived_ns", "name", "size", "inode"]


def test_the_next_look_is_when_the_oldest_that_stays_becomes_too_old(swept: Swept) -> None:
    arrive(swept.spool.done, "a.csv", b"a")
    arrived_ns = (swept.spool.done / "a.csv").lstat().st_ctime_ns
    swept.retention.look(0.0, arrived_ns + DAY_NS - 20 * 10**9, days(1), None)
    assert swept.retention.due_at == pytest.approx(20.0)
    swept.retention.look(swept.retention.due_at, arrived_ns + DAY_NS, days(1), None)  # not older than the limit yet
    assert swept.retention.due_at == pytest.approx(20.0 + retention._PAUSE_A_SLICE_SECONDS)
    swept.retention.look(swept.retention.due_at, arrived_ns + DAY_NS + 10**9, days(1), None)
    assert swept.removed() == (1, 1)
