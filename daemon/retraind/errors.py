"""The error tree: what went wrong (a code from a closed set), what becomes of the job, and the exit status.

Each family fixes its disposition and its exit status; a code only names the cause. Codes are metric labels and
stand in reason files, so a code is never renamed. This module does no I/O and knows nothing of jobs.
"""

import enum
from typing import ClassVar, Self


class Disposition(enum.Enum):
    """What the service does with the job or with itself when an error of a family comes up."""

    STOP = "stop at start; at reload the configuration in force stays"
    QUARANTINE = "move the dataset to quarantine with the reason, no retry"
    WAIT = "this dataset waits, the others go on; no attempt is used up"
    DEFER = "wait for the machine to heal; no attempt is used up"
    RESUME = "back to the queue; no attempt is used up"
    RETRY = "try again after a pause, up to worker.max_attempts, then quarantine"
    RETRY_SMALLER = "try again with half the batch, up to worker.max_attempts, then quarantine"
    RETRY_FLOAT32 = "once more in float32 where a lower precision was used, else quarantine"
    RETRY_PUBLISH = "keep the weights and try to publish again; nothing is trained twice"


class RetraindError(Exception):
    """Base of everything that is raised on purpose.

    `line` and `column` count from 1 and point into the dataset or the configuration file; `remedy` is what the
    reader can do about it, as a sentence of its own.
    """

    disposition: ClassVar[Disposition]
    exit_status: ClassVar[int]
    codes: ClassVar[frozenset[str]]

    def __init__(
        self, code: str, message: str, *, line: int | None = None, column: int | None = None, remedy: str = ""
    ) -> None:
        assert code in self.codes, f"{type(self).__name__} has no code {code!r}"
        super().__init__(message)
        self.code = code
        self.message = message
        self.line = line
        self.column = column
        self.remedy = remedy

    def __str__(self) -> str:
        """One line for the log: code, place, what happened, what to do."""
        return describe(self.code, self.message, self.line, self.column, self.remedy)

    def within(self, name: str) -> Self:
        """The same error, told of the one of several files that it is in."""
        message = f"{name}: {self.message}"
        return type(self)(self.code, message, line=self.line, column=self.column, remedy=self.remedy)


def describe(code: str, message: str, line: int | None, column: int | None, remedy: str) -> str:
    """The one form in which a reason is shown to people."""
    place = ""
    if line is not None:
        place = f" at line {line}" + (f", column {column}" if column is not None else "")
    elif column is not None:
        place = f" at column {column}"
    return f"{code}{place}: {message}" + (f" ({remedy})" if remedy else "")


class ConfigError(RetraindError):
    """The configuration is not usable. All problems of a file are joined in one error, one a line."""

    disposition = Disposition.STOP
    exit_status = 78  # EX_CONFIG: the unit's RestartPreventExitStatus
    codes = frozenset({"bad_config"})


class UsageError(RetraindError):
    """A command was asked for something that is not there: an unknown job, a version that does not exist."""

    disposition = Disposition.STOP
    exit_status = 64  # EX_USAGE
    codes = frozenset({"not_found", "bad_argument"})


class IntakeError(RetraindError):
    """What lies in incoming/ is not a file that can be taken."""

    disposition = Disposition.QUARANTINE
    exit_status = 65  # EX_DATAERR
    codes = frozenset({"not_regular", "vanished"})


class DataError(RetraindError):
    """The dataset can not be learned from, and trying again will not change that."""

    disposition = Disposition.QUARANTINE
    exit_status = 65
    codes = frozenset(
        {
            "empty",
            "no_rows",
            "too_few_rows",
            "malformed",
            "encoding",
            "truncated",
            "too_large",
            "too_many_columns",
            "ambiguous_columns",
            "missing_columns",
            "no_numeric",
            "too_many_bad_rows",
            "too_many_missing",
            "object_dtype",
            "shape",
            "unsupported_format",
        }
    )


class DatasetChanged(RetraindError):
    """Somebody wrote to the dataset while it was read. Once it is quiet again it may well be good."""

    disposition = Disposition.RETRY
    exit_status = 74  # EX_IOERR
    codes = frozenset({"changed_while_reading"})


class HostError(RetraindError):
    """The machine can not do the work now. Never the dataset's fault."""

    disposition = Disposition.DEFER
    exit_status = 69  # EX_UNAVAILABLE
    codes = frozenset(
        {
            "preflight_failed",
            "disk_full",
            "no_numpy",
            "no_torch",
            "worker_not_started",
            "no_model",
            "unreadable",
            "host_io",
            "spool_unusable",
            "state_unusable",
            "port_taken",
            "already_running",
        }
    )


class ReaderMissing(RetraindError):
    """The worker's interpreter lacks what one format needs: the fault is the machine's, but other files can be read."""

    disposition = Disposition.WAIT
    exit_status = 69
    codes = frozenset({"no_reader"})


class Interrupted(RetraindError):
    """The worker was asked to stop and did so at a safe point."""

    disposition = Disposition.RESUME
    exit_status = 75  # EX_TEMPFAIL
    codes = frozenset({"terminated"})


class ResourceError(RetraindError):
    """Device or host memory ran out with this batch size."""

    disposition = Disposition.RETRY_SMALLER
    exit_status = 71  # EX_OSERR
    codes = frozenset({"out_of_memory"})


class TrainingError(RetraindError):
    """Training did not lead to finite weights."""

    disposition = Disposition.RETRY_FLOAT32
    exit_status = 70  # EX_SOFTWARE
    codes = frozenset({"diverged", "non_finite_loss"})


class WorkerLost(RetraindError):
    """The worker ended without saying why, said nothing for too long, or did not speak the protocol."""

    disposition = Disposition.RETRY
    exit_status = 70
    codes = frozenset({"worker_crash", "silent", "timeout", "protocol"})


class PublishError(RetraindError):
    """The weights are good but could not be put in place."""

    disposition = Disposition.RETRY_PUBLISH
    exit_status = 73  # EX_CANTCREAT
    codes = frozenset({"models_dir_unwritable", "disk_full", "path_taken", "locked", "sign_failed"})


# What a worker may report about itself, by its exit status. 65 and 70 are told apart by the code it sent.
WORKER_FAMILIES: tuple[type[RetraindError], ...] = (
    IntakeError,
    DataError,
    DatasetChanged,
    HostError,
    ReaderMissing,
    Interrupted,
    ResourceError,
    TrainingError,
)

# Every code with which a dataset can end in quarantine: labels of a metric, so a closed set.
QUARANTINE_CODES: tuple[str, ...] = tuple(
    sorted(
        set().union(
            *(f.codes for f in (IntakeError, DataError, DatasetChanged, ResourceError, TrainingError, WorkerLost))
        )
    )
)


def worker_error(code: str, message: str, **details: object) -> RetraindError:
    """Rebuilds the error that a worker reported by its code.

    Raises KeyError for a code that no worker may send.
    """
    for family in WORKER_FAMILIES:
        if code in family.codes:
            return family(code, message, **details)  # type: ignore[arg-type]
    raise KeyError(code)
