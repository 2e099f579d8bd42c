"""Finds every job again after a crash, a power cut or a disk fault, and brings each to exactly one state.

Runs before the first job and again after any disk fault in the loop, so each step of it may be repeated. What was
trained is not trained again: a complete candidate on disk means that only the publication is owed.
"""

import logging
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from retraind.job import Job, JobState, Reason, advance
from retraind.printable import printable
from retraind.supervisor.ledger import Ledger
from retraind.supervisor.spool import Spool

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    """`unfiled` are ended jobs whose dataset has not reached done/ or quarantine/; `interrupted` were running."""

    unfiled: list[Job] = field(default_factory=list)
    interrupted: list[Job] = field(default_factory=list)


def recover(spool: Spool, ledger: Ledger, now: datetime, running: str = "") -> Recovered:
    """Reads what is on disk and settles it; the job `running`, which has a worker now, is left alone."""
    found = Recovered()
    ended = {job.id: job for job in ledger.load()}
    for job_id in spool.claimed():
        if job_id in ended:
            found.unfiled.append(ended[job_id])
        elif job_id not in ledger.open_jobs:
            _adopt(spool, ledger, job_id, now)
    for job in list(ledger.open_jobs.values()):
        if job.id == running:
            continue
        if job.state is JobState.RUNNING:
            found.interrupted.append(_settle_running(ledger, job, now))
        current = ledger.open_jobs.get(job.id, job)
        if current.state is not JobState.TRAINED and spool.dataset(job.id) is None:
            found.unfiled.append(_give_up(ledger, current, now))
    return found


def _adopt(spool: Spool, ledger: Ledger, job_id: str, now: datetime) -> None:
    """A claimed file without a record: power failed between the claim and its record, or the record was damaged."""
    source = spool.dataset(job_id)
    if source is None:
        spool.release(job_id)
        return
    name = printable(source.rpartition(b"/")[2])
    log.warning("job %s: %s was claimed, but has no record: taken up anew", job_id, name)
    ledger.save(Job(id=job_id, name=name, state=JobState.QUEUED, created_at=now, updated_at=now))


def _settle_running(ledger: Ledger, job: Job, now: datetime) -> Job:
    if ledger.candidate(job.id) is not None:
        log.info("job %s: %s was trained when the service ended: publishing it", job.id, job.name)
        return ledger.save(advance(job, JobState.TRAINED, now))
    # The service's end is not the dataset's fault: the attempt is given back, the interruption counted.
    changes = {"attempts": max(job.attempts - 1, 0), "num_interruptions": job.num_interruptions + 1}
    log.info("job %s: %s was running when the service ended: queued again", job.id, job.name)
    return ledger.save(advance(job, JobState.QUEUED, now, **changes))


def _give_up(ledger: Ledger, job: Job, now: datetime) -> Job:
    """Somebody took the dataset out of active/: nothing to train on, and only the empty claim to file."""
    place = Path("active") / job.id
    reason = Reason(code="vanished", message=f"{place} is empty: the file was moved away while the job was open")
    log.error("job %s: %s is gone from %s", job.id, job.name, place)
    return ledger.save(advance(job, JobState.QUARANTINED, now, reason=reason))
