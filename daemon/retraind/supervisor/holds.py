"""What an operator holds back, a job or the whole queue: one empty file each in <state.dir>/holds, named for it.

The commands write, the service reads before each start. A file that exists is a hold, whoever was killed when; an
empty one fits on a full disk, and two commands at once do not meet. The service only removes the holds of jobs that
have ended. Raises OSError: a hold that can not be read must not count as none.
"""

import logging
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retraind import fsio

log = logging.getLogger(__name__)

# No job's id: those begin with a digit.
_QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class Held:
    """What is held: jobs by their ids, and whether nothing at all is to be started."""

    jobs: frozenset[str] = frozenset()
    queue: bool = False


class Holds:
    """The holds as the service obeys them, in memory between two looks."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self.now = Held()

    def look(self) -> None:
        """Reads them anew, one listing of a directory that is nearly always empty, and says what has changed."""
        before, self.now = self.now, read(self._state_dir)
        for job_id in sorted(self.now.jobs - before.jobs):
            log.info("job %s: held by an operator", job_id)
        for job_id in sorted(before.jobs - self.now.jobs):
            log.info("job %s: no longer held", job_id)
        if self.now.queue != before.queue:
            log.info("the queue is %s", "held by an operator" if self.now.queue else "no longer held")

    def forget_ended(self, open_jobs: Container[str]) -> None:
        """Removes the holds of jobs that are not open. One that can not be removed is in nobody's way."""
        for job_id in self.now.jobs:
            if job_id not in open_jobs:
                with suppress(OSError):
                    (_directory(self._state_dir) / job_id).unlink()


def read(state_dir: Path) -> Held:
    """What is held now. Without the directory, which the first hold makes, nothing is."""
    try:
        names = frozenset(path.name for path in _directory(state_dir).iterdir())
    except FileNotFoundError:
        return Held()
    return Held(names - {_QUEUE}, _QUEUE in names)


def place(state_dir: Path, job_id: str | None) -> bool:
    """Holds the job, or with None the queue; durable when it returns. False when it was held before."""
    directory = _directory(state_dir)
    fsio.make_dir(directory, 0o750)
    try:
        fsio.write_new(directory / (job_id or _QUEUE), b"", mode=0o640)
    except FileExistsError:
        return False
    finally:
        fsio.fsync_dir(directory)
    return True


def lift(state_dir: Path, job_id: str | None) -> bool:
    """Takes the hold of the job, or with None of the queue, away, durably. False when there was none."""
    directory = _directory(state_dir)
    try:
        (directory / (job_id or _QUEUE)).unlink()
    except FileNotFoundError:
        return False
    fsio.fsync_dir(directory)
    return True


def _directory(state_dir: Path) -> Path:
    return state_dir / "holds"
