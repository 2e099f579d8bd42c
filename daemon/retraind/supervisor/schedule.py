"""What becomes of a job after an attempt, and when: pure decisions from the error's disposition. No I/O, no clock.

`next_step` is the table of dispositions in code; `backoff` and `wait_alone` the only places where pauses grow.
"""

from dataclasses import dataclass, replace

import msgspec

from retraind.config import Config, Precision, TrainingConfig
from retraind.errors import Disposition, RetraindError
from retraind.job import Job, JobState, Reason

# A crash that heals, heals within seconds; a machine that is down is asked once a minute, so that it heals by itself
# soon after the fault goes, without filling the log.
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
# A dataset that waits alone costs a worker's start each time, and a reload asks at once.
_LONGEST_WAIT_SECONDS = 600.0
# Below this a batch is no longer what exhausted the memory.
_SMALLEST_BATCH = 64


@dataclass(frozen=True, slots=True)
class Step:
    """The job's next state. `pause_seconds` is before the next try; `holds_queue` says that the machine is at fault."""

    state: JobState
    reason: Reason
    attempts: int
    pause_seconds: float = 0.0
    holds_queue: bool = False
    batch_size: int | None = None
    precision: Precision | None = None


def backoff(num_failures: int) -> float:
    """Seconds to wait after the n-th failure in a row (n from 1): doubling, bounded."""
    return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(max(num_failures, 1) - 1, 16))


def wait_alone(job: Job) -> float:
    """Seconds until a dataset that waits while others go on is tried again: as long again as it is old, bounded."""
    age = (job.updated_at - job.created_at).total_seconds()  # of two wall clocks, so perhaps negative
    return min(_LONGEST_WAIT_SECONDS, max(_FIRST_PAUSE_SECONDS, age))


def reason_of(error: RetraindError) -> Reason:
    """The error as it stands in a job's record and in a reason file."""
    return Reason(code=error.code, message=error.message, line=error.line, column=error.column, remedy=error.remedy)


def next_step(job: Job, error: RetraindError, config: Config, num_deferrals: int, *, has_room: bool = False) -> Step:
    """What becomes of a running job whose attempt ended with `error`; `num_deferrals` counts those in a row.

    The running attempt is already counted in job.attempts; it is given back where it was not the job's fault. With
    `has_room` there is room for other jobs now that this one has ended: a disk that was full, it filled itself.
    """
    end = Step(JobState.QUARANTINED, reason_of(error), job.attempts, batch_size=job.batch_size, precision=job.precision)
    retry = replace(end, state=JobState.DEFERRED, pause_seconds=backoff(job.attempts))
    match error.disposition:
        case Disposition.RESUME:
            return replace(end, state=JobState.QUEUED, attempts=job.attempts - 1)
        case Disposition.WAIT:
            return replace(retry, attempts=job.attempts - 1, pause_seconds=wait_alone(job))
        case Disposition.DEFER if error.code == "disk_full" and has_room:
            return replace(retry, attempts=job.attempts - 1, pause_seconds=wait_alone(job))
        case Disposition.DEFER:
            pause = backoff(num_deferrals + 1)
            return replace(retry, attempts=job.attempts - 1, pause_seconds=pause, holds_queue=True)
        case _ if job.attempts >= config.worker.max_attempts:
            return end
        case Disposition.RETRY:
            return retry
        case Disposition.RETRY_SMALLER:
            smaller = (job.batch_size or config.training.batch_size) // 2
            return replace(retry, batch_size=smaller) if smaller >= _SMALLEST_BATCH else end
        case Disposition.RETRY_FLOAT32:
            is_lowest = (job.precision or config.training.precision) == "float32"
            return end if is_lowest else replace(retry, precision="float32")
        case _:
            return end


def lowered(training: TrainingConfig, job: Job) -> TrainingConfig:
    """The training settings with what earlier attempts of this job have lowered."""
    changes = {"batch_size": job.batch_size, "precision": job.precision}
    return msgspec.structs.replace(training, **{key: value for key, value in changes.items() if value is not None})
