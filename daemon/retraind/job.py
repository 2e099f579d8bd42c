"""A job and its states: the supervisor's memory of one dataset, written to disk before it is acted on.

Owns the table of legal transitions. Does no I/O and reads no clock: times are handed in. A job is immutable;
`advance` gives the next one or raises ValueError for a step that the table does not allow.
"""

import enum
from datetime import datetime

import msgspec

from retraind.column_rules import HeldTo
from retraind.config import DataConfig, Device, Precision, PreflightConfig, TrainingConfig
from retraind.errors import describe


class JobState(enum.StrEnum):
    """Where a job stands. The last four are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DEFERRED = "deferred"
    TRAINED = "trained"  # candidate on disk, publication still owed: from here nothing is trained again
    PUBLISHED = "published"
    DUPLICATE = "duplicate"  # its content had been published before with the same settings
    REJECTED = "rejected"  # by the gate
    QUARANTINED = "quarantined"


TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.QUARANTINED}),
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.DEFERRED, JobState.TRAINED, JobState.DUPLICATE, JobState.QUARANTINED}
    ),
    JobState.DEFERRED: frozenset({JobState.RUNNING, JobState.QUARANTINED}),
    JobState.TRAINED: frozenset({JobState.PUBLISHED, JobState.DUPLICATE, JobState.REJECTED, JobState.QUEUED}),
    JobState.PUBLISHED: frozenset(),
    JobState.DUPLICATE: frozenset(),
    JobState.REJECTED: frozenset(),
    JobState.QUARANTINED: frozenset(),
}

# The file of the work directory that one attempt leaves for the next; the worker writes it and judges it.
CHECKPOINT_NAME = "checkpoint"

FINAL_STATES = frozenset(state for state, following in TRANSITIONS.items() if not following)


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a job is where it is: the content of a reason file and of a job's last setback."""

    code: str
    message: str
    line: int | None = None
    column: int | None = None
    remedy: str = ""

    def __str__(self) -> str:
        """One line for the log: code, place, what happened, what to do."""
        return describe(self.code, self.message, self.line, self.column, self.remedy)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One dataset on its way from the spool to a model.

    `name` is the file's name made printable, a label only: the file itself is the one entry of active/<id>/.
    `batch_size` and `precision` hold what a retry has lowered; None is the configured value.
    """

    id: str
    name: str
    state: JobState
    created_at: datetime
    updated_at: datetime
    attempts: int = 0
    reason: Reason | None = None
    num_interruptions: int = 0  # times the service itself ended with this job running
    num_bytes: int = 0
    mtime_ns: int = 0
    sha256: str = ""
    settings: str = ""  # fingerprint of what decides the weights beside the data; see config.TrainingConfig
    batch_size: int | None = None
    precision: Precision | None = None
    version: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told: everything it needs, as one file whose path is its only argument.

    `datasets` are directories with one file each, or files; they are read as one dataset in this order.
    """

    job: str
    attempt: int
    datasets: list[str]
    work_dir: str
    socket: str
    device: Device
    training: TrainingConfig
    data: DataConfig
    log_level: str
    published: str = ""  # the model's directory, where a candidate is compared with what is live; empty: it is not
    preflight: PreflightConfig = PreflightConfig()
    held_to: HeldTo | None = None


def advance(job: Job, state: JobState, now: datetime, **changes: object) -> Job:
    """The job after one legal step. Raises ValueError when TRANSITIONS has no such step."""
    if state not in TRANSITIONS[job.state]:
        raise ValueError(f"job {job.id} can not go from {job.state} to {state}")
    return msgspec.structs.replace(job, state=state, updated_at=now, **changes)
