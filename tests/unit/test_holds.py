"""Holds as files: durable, one a job, forgotten with their job, and obeyed by the queue."""

import errno
import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import disk_faults
import pytest
from builders import JOB_ID, LATER, NOW, OTHER_ID, make_job
from disk_faults import DiskFault, synced

from retraind.config import Config
from retraind.job import JobState, advance
from retraind.supervisor import holds
from retraind.supervisor.holds import Held, Holds
from retraind.supervisor.ledger import Ledger
from retraind.supervisor.metrics import Metrics
from retraind.supervisor.queue import Queue
from retraind.supervisor.spool import Spool
from retraind.supervisor.wake import Wake


def test_a_hold_is_there_until_it_is_lifted(tmp_path: Path) -> None:
    assert holds.read(tmp_path) == Held()
    assert holds.place(tmp_path, JOB_ID)
    assert not holds.place(tmp_path, JOB_ID), "it was there"
    assert holds.place(tmp_path, None)
    assert holds.read(tmp_path) == Held(frozenset({JOB_ID}), queue=True)
    assert holds.lift(tmp_path, None)
    assert not holds.lift(tmp_path, None)
    assert holds.read(tmp_path) == Held(frozenset({JOB_ID}))
    assert holds.lift(tmp_path, JOB_ID)
    assert holds.read(tmp_path) == Held()


def test_a_hold_is_durable_before_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "holds"
    paths = synced(monkeypatch, lambda: holds.place(tmp_path, JOB_ID))
    assert paths == [str(tmp_path / ".holds.tmp"), str(tmp_path), str(directory / JOB_ID), str(directory)]
    # One that was placed by a command that was killed in between is made durable too.
    assert synced(monkeypatch, lambda: holds.place(tmp_path, JOB_ID)) == [str(directory)]
    assert synced(monkeypatch, lambda: holds.lift(tmp_path, JOB_ID)) == [str(directory)]


def test_only_the_service_and_its_group_see_the_holds(tmp_path: Path) -> None:
    holds.place(tmp_path, JOB_ID)
    assert stat.S_IMODE((tmp_path / "holds").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "holds" / JOB_ID).stat().st_mode) == 0o640


@pytest.mark.parametrize("fails", [disk_faults.is_file_open, disk_faults.is_file_fsync])
def test_a_disk_that_fails_leaves_no_hold_that_was_not_told_of(
    fails: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskFault(errno.EIO, fails)
    with monkeypatch.context() as patch:
        disk.install(patch)
        with pytest.raises(OSError, match="Input/output") as caught:
            holds.place(tmp_path, JOB_ID)
    assert caught.value is disk.error
    assert holds.read(tmp_path) == Held()


def test_changes_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    obeyed = Holds(tmp_path)
    for change in (holds.place, holds.lift):
        change(tmp_path, JOB_ID)
        change(tmp_path, None)
        obeyed.look()
        obeyed.look()
    assert [record.message for record in caplog.records] == [
        f"job {JOB_ID}: held by an operator", "the queue is held by an operator",
        f"job {JOB_ID}: no longer held", "the queue is no longer held",
    ]  # fmt: skip


def test_the_hold_of_a_job_that_has_ended_goes_and_the_others_stay(tmp_path: Path) -> None:
    for job_id in (JOB_ID, OTHER_ID, None):
        holds.place(tmp_path, job_id)
    obeyed = Holds(tmp_path)
    obeyed.look()
    obeyed.forget_ended({OTHER_ID: make_job(id=OTHER_ID)})
    assert holds.read(tmp_path) == Held(frozenset({OTHER_ID}), queue=True)


def test_holds_that_can_not_be_read_do_not_count_as_none(tmp_path: Path) -> None:
    obeyed = Holds(tmp_path)
    holds.place(tmp_path, None)
    obeyed.look()
    (tmp_path / "holds").rename(tmp_path / "away")
    (tmp_path / "holds").write_text("no directory")
    with pytest.raises(NotADirectoryError):
        obeyed.look()
    assert obeyed.now.queue


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    spool, ledger, wake = Spool(tmp_path / "spool"), Ledger(tmp_path / "state"), Wake()
    spool.open()
    ledger.open()
    yield Queue(Config(), spool, ledger, wake, Metrics())
    wake.close()


def test_the_queue_passes_over_a_held_job_and_never_wakes_for_it(queue: Queue) -> None:
    ledger = queue._ledger
    first, second = ledger.save(make_job()), ledger.save(make_job(id=OTHER_ID))
    holds.place(ledger.state_dir, JOB_ID)
    queue.holds.look()
    assert queue.take(1.0) == second
    ledger.save(advance(second, JobState.QUARANTINED, NOW))
    assert queue.take(1.0) is None
    assert queue.next_try(1.0) is None, "a time that has passed would turn the loop without a pause"
    holds.lift(ledger.state_dir, JOB_ID)
    queue.holds.look()
    assert queue.next_try(1.0) is not None
    assert queue.take(1.0) == first


def test_a_held_queue_gives_nothing_not_even_what_is_due_again(queue: Queue) -> None:
    job = queue._ledger.save(advance(make_job(state=JobState.RUNNING), JobState.DEFERRED, LATER))
    (queue._spool.incoming / "a.csv").write_bytes(b"1,2\n")
    holds.place(queue._ledger.state_dir, None)
    queue.holds.look()
    assert queue.take(1.0) is None
    assert queue.next_try(1.0) is None
    assert (queue._spool.incoming / "a.csv").exists()
    holds.lift(queue._ledger.state_dir, None)
    queue.holds.look()
    assert queue.take(1.0) == job
