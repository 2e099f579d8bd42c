"""The table of dispositions: what becomes of a job for every way in which an attempt can end, and how long it rests."""

from datetime import timedelta

import msgspec
import pytest
from builders import make_job

from retraind import errors
from retraind.config import Config, Precision, TrainingConfig, WorkerConfig
from retraind.errors import Disposition, RetraindError
from retraind.job import Job, JobState, Reason
from retraind.supervisor.schedule import backoff, lowered, next_step, reason_of

CONFIG = Config(worker=WorkerConfig(max_attempts=3))
BAD_DATA = errors.DataError("malformed", "no number", line=3, column=2, remedy="look")
NOT_A_FILE = errors.IntakeError("vanished", "gone")
CHANGED = errors.DatasetChanged("changed_while_reading", "written to")
NO_GPU = errors.HostError("preflight_failed", "no GPU")
NO_READER = errors.ReaderMissing("no_reader", "no pyarrow")
ASKED_TO_STOP = errors.Interrupted("terminated", "stopped")
NO_MEMORY = errors.ResourceError("out_of_memory", "no room")
DIVERGED = errors.TrainingError("diverged", "loss 1e9")
FULL = errors.HostError("disk_full", "no space left")
CRASHED = errors.WorkerLost("worker_crash", "SIGSEGV")


def running(attempts: int, **changes: object) -> Job:
    return make_job(state=JobState.RUNNING, attempts=attempts, **changes)


@pytest.mark.parametrize(
    ("error", "attempt", "state", "attempts", "pause", "holds"),
    [
        # the dataset's fault: no second try, whatever the attempt
        (BAD_DATA, 1, "quarantined", 1, 0, False),
        (BAD_DATA, 3, "quarantined", 3, 0, False),
        (NOT_A_FILE, 1, "quarantined", 1, 0, False),
        # the machine's fault: the attempt is given back, the whole queue rests
        (NO_GPU, 1, "deferred", 0, 1, True),
        (NO_GPU, 3, "deferred", 2, 1, True),
        # what one format needs is missing: the attempt is given back, the others go on
        (NO_READER, 1, "deferred", 0, 1, False),
        (NO_READER, 3, "deferred", 2, 1, False),
        # asked to stop: given back, no pause
        (ASKED_TO_STOP, 1, "queued", 0, 0, False),
        (ASKED_TO_STOP, 3, "queued", 2, 0, False),
        # nobody's or anybody's fault: up to max_attempts
        (CRASHED, 1, "deferred", 1, 1, False),
        (CRASHED, 2, "deferred", 2, 2, False),
        (CRASHED, 3, "quarantined", 3, 0, False),
        (CHANGED, 2, "deferred", 2, 2, False),
        (CHANGED, 3, "quarantined", 3, 0, False),
        (NO_MEMORY, 1, "deferred", 1, 1, False),
        (NO_MEMORY, 3, "quarantined", 3, 0, False),
        (DIVERGED, 1, "deferred", 1, 1, False),
        (DIVERGED, 3, "quarantined", 3, 0, False),
    ],
)
def test_the_error_decides_what_becomes_of_the_job(
    error: RetraindError, attempt: int, state: str, attempts: int, pause: float, *, holds: bool
) -> None:
    step = next_step(running(attempt), error, CONFIG, num_deferrals=0)
    assert (step.state.value, step.attempts, step.pause_seconds, step.holds_queue) == (state, attempts, pause, holds)
    assert step.reason == reason_of(error)


@pytest.mark.parametrize(("age", "pause"), [(0, 1), (-3600, 1), (1, 1), (7, 7), (300, 300), (86_400, 600)])
def test_what_waits_alone_waits_as_long_again_as_it_is_old(age: float, pause: float) -> None:
    job = running(1)
    job = msgspec.structs.replace(job, updated_at=job.created_at + timedelta(seconds=age))
    assert next_step(job, NO_READER, CONFIG, 0).pause_seconds == pause
    assert next_step(job, FULL, CONFIG, 5, has_room=True).pause_seconds == pause


@pytest.mark.parametrize("has_room", [True, False])
def test_a_disk_that_is_full_holds_the_others_unless_there_is_room_again(*, has_room: bool) -> None:
    step = next_step(running(3), FULL, CONFIG, num_deferrals=0, has_room=has_room)
    assert (step.state.value, step.attempts, step.holds_queue) == ("deferred", 2, not has_room)
    assert next_step(running(3), NO_GPU, CONFIG, num_deferrals=0, has_room=has_room).holds_queue


def test_the_table_covers_every_disposition_of_an_attempt() -> None:
    tried = {BAD_DATA, NO_GPU, NO_READER, ASKED_TO_STOP, CRASHED, NO_MEMORY, DIVERGED}
    # The other two never come from an attempt: a bad configuration stops the service, publishing has its own retry.
    assert {error.disposition for error in tried} == set(Disposition) - {Disposition.STOP, Disposition.RETRY_PUBLISH}


@pytest.mark.parametrize("error", [errors.ConfigError("bad_config", ""), errors.PublishError("locked", "")])
def test_what_an_attempt_can_not_raise_ends_it(error: RetraindError) -> None:
    assert next_step(running(1), error, CONFIG, 0).state is JobState.QUARANTINED


@pytest.mark.parametrize(
    ("lowered_to", "configured", "next_size"),
    [(None, 2048, 1024), (1024, 2048, 512), (129, 2048, 64), (128, 2048, 64), (127, 2048, None), (None, 64, None)],
)
def test_memory_that_ran_out_halves_the_batch_down_to_64(
    lowered_to: int | None, configured: int, next_size: int | None
) -> None:
    config = Config(training=TrainingConfig(batch_size=configured))
    step = next_step(running(1, batch_size=lowered_to), NO_MEMORY, config, 0)
    if next_size is None:
        assert step.state is JobState.QUARANTINED
    else:
        assert (step.state, step.batch_size) == (JobState.DEFERRED, next_size)


@pytest.mark.parametrize(
    ("lowered_to", "configured", "again"),
    [(None, "auto", True), (None, "bf16", True), (None, "fp16", True), (None, "float32", False),
     ("float32", "auto", False), ("float32", "fp16", False)],
)  # fmt: skip
def test_training_that_diverged_is_tried_once_in_float32(
    lowered_to: Precision | None, configured: Precision, *, again: bool
) -> None:
    config = Config(training=TrainingConfig(precision=configured))
    step = next_step(running(1, precision=lowered_to), DIVERGED, config, 0)
    expected = (JobState.DEFERRED, "float32") if again else (JobState.QUARANTINED, lowered_to)
    assert (step.state, step.precision) == expected


@pytest.mark.parametrize("error", [CRASHED, NO_GPU, NO_READER, ASKED_TO_STOP, CHANGED])
def test_what_earlier_attempts_lowered_stays_lowered(error: RetraindError) -> None:
    step = next_step(running(2, batch_size=512, precision="float32"), error, CONFIG, 0)
    assert (step.batch_size, step.precision) == (512, "float32")


def test_one_attempt_means_no_retry() -> None:
    config = Config(worker=WorkerConfig(max_attempts=1))
    for error in (CRASHED, CHANGED, NO_MEMORY, DIVERGED):
        assert next_step(running(1), error, config, 0).state is JobState.QUARANTINED


def test_a_limit_lowered_by_a_reload_ends_a_job_that_is_past_it() -> None:
    config = Config(worker=WorkerConfig(max_attempts=2))
    assert next_step(running(5), CRASHED, config, 0).state is JobState.QUARANTINED


@pytest.mark.parametrize(("num_deferrals", "pause"), [(0, 1), (1, 2), (2, 4), (5, 32), (6, 60), (1000, 60)])
def test_a_machine_that_stays_broken_is_asked_ever_less_often(num_deferrals: int, pause: float) -> None:
    step = next_step(running(1), NO_GPU, CONFIG, num_deferrals)
    assert (step.state, step.attempts, step.pause_seconds) == (JobState.DEFERRED, 0, pause)


def test_pauses_double_from_one_second_to_one_minute_and_never_overflow() -> None:
    assert [backoff(number) for number in (1, 2, 3, 4, 5, 6, 7, 8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff(10**9) == 60
    assert backoff(0) == backoff(-5) == 1


def test_every_step_is_one_that_the_job_may_take() -> None:
    for error in (BAD_DATA, NO_GPU, ASKED_TO_STOP, CRASHED, CHANGED, NO_MEMORY, DIVERGED):
        for attempt in (1, 2, 3, 4):
            step = next_step(running(attempt), error, CONFIG, 0)
            assert step.state in {JobState.QUEUED, JobState.DEFERRED, JobState.QUARANTINED}
            assert 0 <= step.attempts <= attempt


def test_the_reason_keeps_place_and_remedy() -> None:
    assert reason_of(BAD_DATA) == Reason(code="malformed", message="no number", line=3, column=2, remedy="look")


@pytest.mark.parametrize(
    ("changes", "batch_size", "precision"),
    [({}, 2048, "bf16"), ({"batch_size": 512}, 512, "bf16"), ({"precision": "float32"}, 2048, "float32")],
)
def test_the_order_carries_what_was_lowered_and_nothing_else(
    changes: dict[str, object], batch_size: int, precision: Precision
) -> None:
    training = TrainingConfig(batch_size=2048, precision="bf16", seed=7)
    assert lowered(training, make_job(**changes)) == TrainingConfig(batch_size=batch_size, precision=precision, seed=7)
