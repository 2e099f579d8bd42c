"""`retraind hold` and `release`: an operator's hand on the queue, as files that the service reads before each start.

Decides nothing of a job itself: what is held is the service's to obey, also one that is down and starts later.
Raises UsageError for a job that does not exist, has ended, or has nothing left but its publication; HostError for a
state directory that is not there or closed to this user; OSError.
"""

import os
from pathlib import Path

from retraind.commands import screen
from retraind.commands.jobs import require_readable
from retraind.config import Config
from retraind.errors import HostError, UsageError
from retraind.job import Job, JobState
from retraind.supervisor import holds
from retraind.supervisor.ledger import read_jobs

_HOLDABLE = frozenset({JobState.QUEUED, JobState.RUNNING, JobState.DEFERRED})


def hold(config: Config, *, job_id: str | None, everything: bool) -> int:
    """Keeps a job, or the queue, from being started. To hold what is held changes nothing."""
    _act_as_owner_of(config.state.dir)
    if everything:
        is_new = holds.place(config.state.dir, None)
        screen.print_line(f"the queue is held{'' if is_new else ' already'}: `retraind release --all` lets it go on")
        return 0
    job = _known(config, job_id)
    if job.state not in _HOLDABLE:
        is_trained = job.state is JobState.TRAINED
        why = "is trained, and will be published" if is_trained else f"has ended: it is {job.state.value}"
        raise UsageError("bad_argument", f"job {job.id} {why}", remedy="only what is not trained yet can be held")
    is_new = holds.place(config.state.dir, job.id)
    stops = "; its worker stops at the next safe point" if job.state is JobState.RUNNING else ""
    screen.print_line(f"{job.id}: {job.name} is held{'' if is_new else ' already'}{stops}")
    return 0


def release(config: Config, *, job_id: str | None, everything: bool) -> int:
    """Takes the hold of a job away, or with `everything` every hold there is."""
    _act_as_owner_of(config.state.dir)
    held = holds.read(config.state.dir)
    if everything:
        for held_id in sorted(held.jobs):
            holds.lift(config.state.dir, held_id)
            screen.print_line(f"{held_id}: released")
        is_lifted = holds.lift(config.state.dir, None)
        screen.print_line("the queue is released" if is_lifted else "the queue was not held")
        return 0
    if job_id not in held.jobs:
        job = _known(config, job_id)
        remedy = "`retraind jobs` shows which are; --all releases the queue"
        raise UsageError("bad_argument", f"job {job.id} is {job.state.value} and not held", remedy=remedy)
    holds.lift(config.state.dir, job_id)
    still = "; the queue as a whole is held: `retraind release --all`" if held.queue else ""
    screen.print_line(f"{job_id}: released{still}")
    return 0


def _known(config: Config, job_id: str | None) -> Job:
    for job in read_jobs(config.state.dir):
        if job.id == job_id:
            return job
    remedy = (
        "`retraind jobs` lists them; a file in incoming/ has no job before it is started: hold the queue with --all"
    )
    raise UsageError("not_found", f"job {job_id} is not known", remedy=remedy)


def _act_as_owner_of(state_dir: Path) -> None:
    """Root becomes the service's user: what it makes has the right owner, and no link there leads root astray."""
    if not state_dir.exists():
        raise HostError("state_unusable", f"{state_dir} is not there", remedy="check state.dir, or start the service")
    owner = state_dir.stat()
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.setgroups([])
        os.setegid(owner.st_gid)
        os.seteuid(owner.st_uid)
    require_readable(state_dir)
