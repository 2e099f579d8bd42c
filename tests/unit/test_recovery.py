"""What the ledger remembers and recovery makes of it: each combination of what a crash can leave on disk."""

import errno
import os
from pathlib import Path

import msgspec
import pytest
from builders import JOB_ID, LATER, NOW, OTHER_ID, leave_candidate, make_job
from disk_faults import synced

from retraind.job import Job, JobState, Reason
from retraind.supervisor import ledger as ledger_module
from retraind.supervisor.ledger import Ledger, read_jobs
from retraind.supervisor.recovery import recover
from retraind.supervisor.spool import Spool


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path / "spool")
    spool.open()
    return spool


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "state")
    ledger.open()
    return ledger


def claim(spool: Spool, job_id: str, name: str = "node-42.csv") -> None:
    (spool.incoming / name).write_text("rows")
    spool.claim(name.encode(), job_id)


def record(ledger: Ledger, job: Job) -> None:
    """A record as an earlier life of the service left it."""
    directory = ledger.jobs_dir / job.id
    directory.mkdir()
    (directory / "job.json").write_bytes(msgspec.json.encode(job))


def test_a_saved_job_is_found_again(ledger: Ledger) -> None:
    job = ledger.save(make_job(name="k\\xff.csv", reason=Reason(code="silent", message="no event", line=3)))
    again = Ledger(ledger.state_dir)
    assert again.load() == []
    assert again.open_jobs == {JOB_ID: job}
    assert read_jobs(ledger.state_dir) == [job]


@pytest.mark.parametrize("data", [b"", b"{", b'{"id": 5}', b"\xff\xfe", b"null", b"[]"])
def test_a_damaged_record_is_put_aside_and_counted(ledger: Ledger, data: bytes) -> None:
    ledger.save(make_job(id=OTHER_ID))
    path = ledger.jobs_dir / JOB_ID / "job.json"
    path.parent.mkdir()
    path.write_bytes(data)
    assert ledger.load() == []
    assert list(ledger.open_jobs) == [OTHER_ID]
    assert ledger.num_bad_records == 1
    assert not path.exists()
    assert path.with_name("job.json.bad").read_bytes() == data


def test_ended_jobs_are_not_kept_open(ledger: Ledger) -> None:
    ledger.save(make_job(state=JobState.PUBLISHED, sha256="aa"))
    assert ledger.open_jobs == {}
    assert [job.id for job in ledger.load()] == [JOB_ID]


def test_content_is_known_by_its_sha256_and_the_settings_together_also_after_a_restart(ledger: Ledger) -> None:
    ledger.save(make_job(state=JobState.PUBLISHED, sha256="aa", settings="s1"))
    ledger.save(make_job(id=OTHER_ID, state=JobState.REJECTED, sha256="bb", settings="s1"))
    for book in (ledger, Ledger(ledger.state_dir)):
        book.load()
        assert book.published_before("aa", "s1") == JOB_ID
        assert book.published_before("aa", "s2") is None
        assert book.published_before("bb", "s1") is None, "a rejected one may be tried again"


def test_old_records_are_pruned_and_open_jobs_never(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "KEEP_RECORDS", 10)
    opened = ledger.save(make_job(id="20200101T000000Z-0000"))
    for number in range(30):
        ledger.save(make_job(id=f"20260101T0000{number:02}Z-0000", state=JobState.PUBLISHED, sha256=f"{number}"))
        ledger.close()
    kept = [job.id for job in read_jobs(ledger.state_dir)]
    assert opened.id in kept
    assert len(kept) <= 12
    assert kept[-1] == "20260101T000029Z-0000"
    assert ledger.published_before("0", "") is None
    assert ledger.published_before("29", "") is not None


def test_an_ended_job_frees_the_work_directory_but_keeps_a_rejected_candidate(ledger: Ledger) -> None:
    for job_id, state in ((JOB_ID, JobState.PUBLISHED), (OTHER_ID, JobState.REJECTED)):
        job = ledger.save(make_job(id=job_id, state=state))
        leave_candidate(ledger.work_dir(job_id))
        (ledger.work_dir(job_id) / "checkpoint").write_bytes(b"of a worker that was killed in its last line")
        ledger.free_work_dir(job)
    assert not ledger.work_dir(JOB_ID).exists()
    assert ledger.candidate(OTHER_ID) is not None
    assert sorted(path.name for path in ledger.work_dir(OTHER_ID).iterdir()) == ["candidate.json", "weights.pt"]


def test_a_fresh_work_directory_holds_nothing_of_an_earlier_attempt_but_its_checkpoint(ledger: Ledger) -> None:
    ledger.save(make_job())
    work_dir = ledger.work_dir(JOB_ID)
    leave_candidate(work_dir)
    (work_dir / "rows.f32").write_bytes(b"of a worker that was killed")
    (work_dir / ".checkpoint.tmp").write_bytes(b"half of one")
    (work_dir / "strange").mkdir()
    (work_dir / "checkpoint").write_bytes(b"where it was")
    ledger.fresh_work_dir(JOB_ID)
    assert [path.name for path in work_dir.iterdir()] == ["checkpoint"]
    assert (work_dir / "checkpoint").read_bytes() == b"where it was"
    assert ledger.candidate(JOB_ID) is None


def test_a_work_directory_does_not_come_back_after_a_power_cut(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ledger.save(make_job(state=JobState.PUBLISHED))
    leave_candidate(ledger.work_dir(JOB_ID))
    assert synced(monkeypatch, lambda: ledger.free_work_dir(job)) == [str(ledger.jobs_dir / JOB_ID)]


def test_a_work_directory_that_can_not_be_emptied_starts_no_attempt(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.save(make_job())
    leave_candidate(ledger.work_dir(JOB_ID))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Read-only"):
        patch.setattr(os, "unlink", refuse)
        ledger.fresh_work_dir(JOB_ID)
    ledger.fresh_work_dir(JOB_ID)
    assert ledger.candidate(JOB_ID) is None, "an old candidate would be taken for the next attempt's"


def test_a_jobs_directory_that_was_half_made_is_swept(ledger: Ledger) -> None:
    (ledger.jobs_dir / f".{JOB_ID}.tmp").mkdir()
    (ledger.jobs_dir / ".snapshot" / "of").mkdir(parents=True)
    ledger.load()
    assert [path.name for path in ledger.jobs_dir.iterdir()] == [".snapshot"], "what is not ours is left alone"


def test_job_ids_are_unique_and_sort_by_time(ledger: Ledger) -> None:
    ids = [ledger.save(make_job(id=ledger.new_id(when))).id for when in (NOW, NOW, LATER)]
    assert len(set(ids)) == 3
    assert max(ids[:2]) < ids[2]


def test_a_claimed_file_without_a_record_becomes_a_job(spool: Spool, ledger: Ledger) -> None:
    claim(spool, JOB_ID)
    recover(spool, ledger, LATER)
    job = ledger.open_jobs[JOB_ID]
    assert (job.state, job.name, job.attempts) == (JobState.QUEUED, "node-42.csv", 0)
    assert read_jobs(ledger.state_dir) == [job]


def test_an_empty_claim_is_swept(spool: Spool, ledger: Ledger) -> None:
    (spool.active / JOB_ID).mkdir()
    recover(spool, ledger, LATER)
    assert spool.claimed() == []
    assert ledger.open_jobs == {}


def test_a_running_job_with_a_complete_candidate_is_only_published(spool: Spool, ledger: Ledger) -> None:
    claim(spool, JOB_ID)
    record(ledger, make_job(state=JobState.RUNNING, attempts=1))
    leave_candidate(ledger.work_dir(JOB_ID))
    recover(spool, ledger, LATER)
    assert ledger.open_jobs[JOB_ID].state is JobState.TRAINED


@pytest.mark.parametrize("left", [b"", b"{", b'{"weights_sha256": "aa"}'])
def test_a_candidate_that_is_not_whole_does_not_count(spool: Spool, ledger: Ledger, left: bytes) -> None:
    claim(spool, JOB_ID)
    record(ledger, make_job(state=JobState.RUNNING, attempts=1))
    ledger.work_dir(JOB_ID).mkdir()
    (ledger.work_dir(JOB_ID) / "candidate.json").write_bytes(left)
    recover(spool, ledger, LATER)
    assert ledger.open_jobs[JOB_ID].state is JobState.QUEUED


def test_a_running_job_gets_its_attempt_back_and_the_interruption_counted(spool: Spool, ledger: Ledger) -> None:
    claim(spool, JOB_ID)
    record(ledger, make_job(state=JobState.RUNNING, attempts=2, num_interruptions=1))
    found = recover(spool, ledger, LATER)
    job = ledger.open_jobs[JOB_ID]
    assert (job.state, job.attempts, job.num_interruptions) == (JobState.QUEUED, 1, 2)
    assert found.interrupted == [job]


def test_the_job_that_has_a_worker_now_is_left_alone(spool: Spool, ledger: Ledger) -> None:
    claim(spool, JOB_ID)
    record(ledger, make_job(state=JobState.RUNNING, attempts=1))
    assert recover(spool, ledger, LATER, running=JOB_ID).interrupted == []
    assert ledger.open_jobs[JOB_ID].state is JobState.RUNNING


@pytest.mark.parametrize("state", [JobState.PUBLISHED, JobState.DUPLICATE, JobState.REJECTED, JobState.QUARANTINED])
def test_an_ended_job_whose_file_was_not_moved_is_owed(spool: Spool, ledger: Ledger, state: JobState) -> None:
    claim(spool, JOB_ID)
    record(ledger, make_job(state=state))
    assert [job.id for job in recover(spool, ledger, LATER).unfiled] == [JOB_ID]


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.RUNNING, JobState.DEFERRED])
def test_an_open_job_whose_file_was_taken_away_ends_with_a_reason(
    spool: Spool, ledger: Ledger, state: JobState
) -> None:
    record(ledger, make_job(state=state, attempts=1))
    found = recover(spool, ledger, LATER)
    assert ledger.open_jobs == {}
    job = read_jobs(ledger.state_dir)[0]
    assert found.unfiled == [job], "its claim and its work directory are to go, now and not at the next start"
    assert job.state is JobState.QUARANTINED
    assert job.reason is not None
    assert job.reason.code == "vanished"


def test_a_trained_job_is_published_also_without_its_file(spool: Spool, ledger: Ledger) -> None:
    record(ledger, make_job(state=JobState.TRAINED, attempts=1))
    recover(spool, ledger, LATER)
    assert ledger.open_jobs[JOB_ID].state is JobState.TRAINED


def test_recovering_twice_changes_nothing_more(spool: Spool, ledger: Ledger) -> None:
    claim(spool, JOB_ID)
    claim(spool, OTHER_ID, "other.csv")
    record(ledger, make_job(state=JobState.RUNNING, attempts=1))
    recover(spool, ledger, LATER)
    first = dict(ledger.open_jobs)
    recover(spool, ledger, LATER)
    assert ledger.open_jobs == first
    assert set(first) == {JOB_ID, OTHER_ID}
