"""Which job is next: jobs that are due again, oldest first, then the files of incoming/ by mtime and name.

Owns the scan of incoming/, the watch on it, the pauses between attempts, what is held, and the claim. Files wait in
incoming/ until a worker is free, so a queue of any length costs one directory entry each. Raises OSError for a disk
that fails.
"""

import logging
import time
from datetime import UTC, datetime

from retraind.config import Config
from retraind.job import Job, JobState, Reason
from retraind.printable import printable
from retraind.supervisor.holds import Holds
from retraind.supervisor.intake import Entry, Intake, Obstacle, Scan
from retraind.supervisor.ledger import Ledger
from retraind.supervisor.metrics import Metrics
from retraind.supervisor.spool import Spool
from retraind.supervisor.wake import POLL_SECONDS, Wake, Watch

log = logging.getLogger(__name__)

# A queue is read again before a choice is made from it, since an older file may have come; not for each of thousands.
_FRESH_SCAN_SECONDS = 0.5
# A burst of events is one reason to look: ten looks a second cost a fifth of a CPU with 10,000 files waiting.
_BUSY_SCAN_SECONDS = 0.1
# What is no file and can not be moved away: each try writes its reason and takes that back, so not at each scan.
_REFUSE_AGAIN_SECONDS = 60.0


class Queue:
    """What waits, in incoming/ and among the open jobs."""

    def __init__(self, config: Config, spool: Spool, ledger: Ledger, wake: Wake, metrics: Metrics) -> None:
        self._config = config
        self._spool, self._ledger, self._wake, self._metrics = spool, ledger, wake, metrics
        self._intake = Intake(spool.incoming, config.intake.quiet_seconds)
        self._watch = Watch(spool.incoming, wake)
        self.holds = Holds(ledger.state_dir)
        self.scan = Scan()
        self._scanned_at = 0.0
        self.scan_at = 0.0  # monotonic time of the next look
        self.hold_until = 0.0  # the machine is at fault: no job before this time
        self._due: dict[str, float] = {}

    def reconfigure(self, config: Config) -> None:
        """Takes the new intervals; what waits is tried again, since the new values may be what it waits for."""
        self._config = config
        self._intake.quiet_seconds = config.intake.quiet_seconds
        self.hold_until = self.scan_at = 0.0
        self._due.clear()

    def wake(self, now: float) -> None:
        """Something happened in incoming/: look soon."""
        self.scan_at = min(self.scan_at, max(now, self._scanned_at + _BUSY_SCAN_SECONDS))

    def look(self, now: float) -> None:
        """Scans when it is time. Raises HostError for a spool that is not usable, OSError."""
        if now < self.scan_at:
            return
        self.scan_at = now + POLL_SECONDS  # should anything below raise
        self._spool.check()
        self._watch.tend(now)
        self._rescan(now)
        for entry in self.scan.refused:
            if now >= entry.not_before:
                self._refuse(entry, now)

    def _rescan(self, now: float) -> None:
        self.scan = self._intake.scan(now, time.time())
        self._scanned_at = now
        interval = self._config.intake.rescan_seconds
        if self._watch.mode == "poll":
            interval = min(interval, POLL_SECONDS)
        due = now + interval
        self.scan_at = due if self.scan.next_due is None else min(due, self.scan.next_due)
        self._metrics.scanned(self.scan, self._spool, self._watch.mode, self._wake.num_events)

    def take(self, now: float) -> Job | None:
        """The next job to run, QUEUED or DEFERRED and durable on disk, or None."""
        if now < self.hold_until or self.holds.now.queue:
            return None
        due = [job for job in self.free_jobs() if now >= self._due.get(job.id, 0.0)]
        return min(due, key=lambda job: job.id, default=None) or self._claim_next(now)

    def free_jobs(self) -> list[Job]:
        """The open jobs that nobody holds."""
        return [job for job in self._ledger.open_jobs.values() if job.id not in self.holds.now.jobs]

    def retry_at(self, job_id: str, when: float) -> None:
        """Keeps an open job back until then. What is known of ended jobs goes, whichever way they ended."""
        self._due = {known: at for known, at in self._due.items() if known in self._ledger.open_jobs}
        self._due[job_id] = when

    def next_try(self, now: float) -> float | None:
        """The earliest time at which an open job that waits may be taken; None when none waits, or all are held."""
        if self.holds.now.queue:
            return None
        times = [max(self._due.get(job.id, 0.0), self.hold_until) for job in self.free_jobs()]
        if self.hold_until > now:
            times.append(self.hold_until)
        return min(times, default=None)

    def _claim_next(self, now: float) -> Job | None:
        if self.scan.ready and now - self._scanned_at > _FRESH_SCAN_SECONDS:
            self._rescan(now)
        while self.scan.ready:
            entry = self.scan.ready.pop(0)
            obstacle = self._intake.obstacle(entry, now)
            if obstacle is None:
                job = self._claim(entry)
                if job is not None:
                    return job
                continue
            self.scan_at = min(self.scan_at, entry.not_before)
            if obstacle is Obstacle.UNREADABLE and not entry.is_reported:
                entry.is_reported = True
                log.warning("%s can not be read by the service: waiting; `chmod g+r` it", printable(entry.name))
        return None

    def _claim(self, entry: Entry) -> Job | None:
        now = datetime.now(UTC)
        job_id = self._ledger.new_id(now)
        try:
            self._spool.claim(entry.name, job_id)
        except FileNotFoundError:  # its producer took it back in this instant
            self._spool.release(job_id)
            return None
        name = printable(entry.name)
        log.info("job %s: took %s, %d bytes", job_id, name, entry.size)
        return self._ledger.save(
            Job(
                id=job_id,
                name=name,
                state=JobState.QUEUED,
                created_at=now,
                updated_at=now,
                num_bytes=entry.size,
                mtime_ns=entry.mtime_ns,
            )
        )

    def _refuse(self, entry: Entry, moment: float) -> None:
        """What can not be moved away is left and counted at each scan, tried again by the minute and spoken of once.

        A full disk heals; a directory that is not the service's to move stays until somebody takes it away.
        """
        now = datetime.now(UTC)
        name = printable(entry.name)
        reason = Reason(code="not_regular", message=f"{name} is not a regular file", remedy="drop files only")
        job_id = self._ledger.new_id(now)
        try:
            self._spool.refuse(entry.name, job_id, reason)
        except OSError as error:
            entry.not_before = moment + _REFUSE_AGAIN_SECONDS
            if not entry.is_reported:
                log.warning(
                    "%s is not a regular file and can not be moved away (%s): left there, tried again every minute",
                    name,
                    error.strerror,
                )
            entry.is_reported = True
            return
        self._ledger.save(
            Job(id=job_id, name=name, state=JobState.QUARANTINED, created_at=now, updated_at=now, reason=reason)
        )
        self._metrics.job_ended("quarantined", reason.code, 0.0)
        log.error("job %s: %s quarantined: %s", job_id, name, reason)

    def close(self) -> None:
        """Stops the watch."""
        self._watch.close()
