"""The table of transitions, each pair of states tried, and the record as it lies on disk."""

import itertools

import msgspec
import pytest
from builders import JOB_ID, LATER, NOW, make_job

from retraind.job import FINAL_STATES, Job, JobState, Reason, advance

# Written from the life of a job, not from the code's table.
LEGAL = {
    "queued": "running quarantined",
    "running": "queued deferred trained duplicate quarantined",
    "deferred": "running quarantined",
    "trained": "published duplicate rejected queued",
    "published": "",
    "duplicate": "",
    "rejected": "",
    "quarantined": "",
}


def test_every_state_is_in_the_table() -> None:
    assert {state.value for state in JobState} == set(LEGAL)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(LEGAL, repeat=2)))
def test_a_step_is_taken_if_and_only_if_it_is_legal(old: str, new: str) -> None:
    job = make_job(state=JobState(old))
    if new in LEGAL[old].split():
        assert advance(job, JobState(new), LATER).state.value == new
    else:
        with pytest.raises(ValueError, match=f"job {JOB_ID} can not go from {old} to {new}"):
            advance(job, JobState(new), LATER)


def test_the_final_states_are_those_that_lead_nowhere() -> None:
    assert {state.value for state in FINAL_STATES} == {old for old, new in LEGAL.items() if not new}


def test_a_trained_job_is_never_sent_to_quarantine_or_trained_on() -> None:
    """What is owed from there on is the publication; only a lost candidate sends it back."""
    for state in (JobState.QUARANTINED, JobState.DEFERRED, JobState.RUNNING):
        with pytest.raises(ValueError, match="can not go"):
            advance(make_job(state=JobState.TRAINED), state, LATER)


def test_a_step_changes_what_it_names_and_leaves_the_old_job_alone() -> None:
    old = make_job(attempts=1, sha256="ab")
    new = advance(old, JobState.RUNNING, LATER, attempts=2)
    assert new == make_job(state=JobState.RUNNING, updated_at=LATER, attempts=2, sha256="ab")
    assert old == make_job(attempts=1, sha256="ab")
    assert new.created_at == NOW


def test_a_record_comes_back_from_disk_as_it_was() -> None:
    reason = Reason(code="malformed", message="no number", line=3, column=2, remedy="look")
    job = make_job(reason=reason, batch_size=512, precision="float32", mtime_ns=1_700_000_000_123_456_789)
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job


def test_a_record_of_a_newer_version_is_still_read() -> None:
    record = msgspec.json.decode(msgspec.json.encode(make_job()))
    assert msgspec.json.decode(msgspec.json.encode({**record, "priority": 3}), type=Job) == make_job()


def test_a_record_needs_no_more_than_its_identity() -> None:
    record = {
        "id": JOB_ID, "name": "node-42.csv", "state": "queued",
        "created_at": "2026-11-30T22:52:12Z", "updated_at": "2026-11-30T22:52:12Z",
    }  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(record), type=Job) == make_job()


def test_a_reason_reads_like_the_error_it_came_from() -> None:
    reason = Reason(code="malformed", message="no number", line=3, column=2, remedy="look")
    assert str(reason) == "malformed at line 3, column 2: no number (look)"
