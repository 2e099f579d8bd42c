"""One job at work: starts its worker, listens to it, and brings the job to its next state when it ends.

Holds the only Child. What an error means for the job is schedule's decision; what is owed afterwards is filing's.
Raises OSError for a disk that fails, and then leaves the job to recovery.
"""

import logging
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from retraind import events
from retraind.config import Config, settings_fingerprint
from retraind.errors import HostError, RetraindError
from retraind.job import Job, JobState, Order, advance
from retraind.supervisor import disks, schedule
from retraind.supervisor.account import describe_gpu
from retraind.supervisor.child import Child, Outcome
from retraind.supervisor.faults import OF_WORKER, Faults
from retraind.supervisor.filing import Filing
from retraind.supervisor.ledger import Ledger
from retraind.supervisor.metrics import Metrics
from retraind.supervisor.queue import Queue
from retraind.supervisor.ready import ReadyWorker
from retraind.supervisor.spool import Spool

log = logging.getLogger(__name__)

# As which fault an error that is the machine's is shown; the others are the worker's own start.
_FAULT_OF_CODE = {"preflight_failed": "preflight", "disk_full": "disk"}


class Attempt:
    """At most one running worker and its job; without one, the worker that is kept ready for the next."""

    def __init__(
        self, spool: Spool, ledger: Ledger, queue: Queue, filing: Filing, faults: Faults, metrics: Metrics
    ) -> None:
        self._spool, self._ledger, self._queue, self._filing = spool, ledger, queue, filing
        self._faults, self._metrics = faults, metrics
        self.ready = ReadyWorker(metrics)
        self.child: Child | None = None
        self.job: Job | None = None
        self.stage = ""
        self.checked = events.Checked(checks=[])  # what the last preflight found
        self._said = self.checked  # what was said of this attempt's
        self._stage_at = 0.0
        self._duplicate_of = ""
        self._num_deferrals = 0

    def start(self, job: Job, config: Config, now: float) -> None:
        """Counts the attempt, writes that down, and spawns."""
        changes = {"attempts": job.attempts + 1, "settings": settings_fingerprint(config), "reason": None}
        job = self._ledger.save(advance(job, JobState.RUNNING, datetime.now(UTC), **changes))
        self._ledger.fresh_work_dir(job.id)
        self.job, self.stage, self._stage_at, self._duplicate_of = job, "", now, ""
        self._said = events.Checked(checks=[])
        child = Child(self._order(job, config), config.worker, self.ready)
        try:
            child.start(now)
        except HostError as error:
            self._end(Outcome(error, "crashed"), config, now)
        except OSError:
            self.job = None  # nothing runs: recovery finds the job and queues it again
            child.close()
            raise
        else:
            self.child = child
            self._metrics.started()

    def _order(self, job: Job, config: Config) -> Order:
        return Order(
            job=job.id,
            attempt=job.attempts,
            datasets=[str(self._spool.active / job.id)],
            work_dir=str(self._ledger.work_dir(job.id)),
            socket=str(self._ledger.state_dir / "events.sock"),
            device=config.device,
            training=schedule.lowered(config.training, job),
            data=config.data,
            preflight=config.preflight,
            log_level=config.log.level,
            published=str(Path(config.models.dir) / config.models.name),
            held_to=self._filing.held_to(config.data),
        )

    def tend(self, config: Config, now: float) -> None:
        """Reads what the worker said, enforces its deadlines, and ends the attempt when it is gone."""
        child = self.child
        if child is None:
            return
        for event in child.read(now):
            self._on_event(event, config, now)
        outcome = child.poll(now)
        if outcome is None:
            return
        for event in child.late_events():
            self._on_event(event, config, now)
        self._metrics.unknown_events(child.num_unknown_events)
        child.close()
        self.child = None
        self._end(outcome, config, now)

    def prepare(self, config: Config, now: float, *, may_start: bool) -> None:
        """Keeps a worker ready for the next job, never beside one that has a job: their memory would add up."""
        if self.child is not None:
            self.ready.expect(now)  # files seldom come alone
        self.ready.tend(config.worker, now, may_start=may_start and self.child is None)

    def fds(self) -> list[int]:
        """What to wait on."""
        return self.ready.fds() if self.child is None else self.child.fds()

    def next_deadline(self, config: Config, now: float) -> float | None:
        """The monotonic time at which `tend` or `prepare` has something to do; None when that is nothing."""
        return self.ready.next_deadline(config.worker, now) if self.child is None else self.child.next_deadline()

    def stop(self, now: float) -> None:
        """Asks a running worker to end; its job goes back to the queue."""
        if self.child is not None:
            self.child.stop(now)

    def _on_event(self, event: events.Event, config: Config, now: float) -> None:
        assert self.job is not None
        match event:
            case events.Stage(name=name):
                self._enter_stage(name, now)
            case events.Progress():
                self._metrics.progress(event)
            case events.Resumed():
                self._metrics.resumed()
            case events.Checkpointed():
                self._metrics.checkpointed()
            case events.Checked():
                self._on_checked(event, self.job.id)
            case events.Ingested(dataset=dataset):
                self._metrics.rows_seen(dataset.num_rows, dataset.num_dropped)
                self.job = msgspec.structs.replace(self.job, sha256=dataset.sha256)
                earlier = self._ledger.published_before(dataset.sha256, self.job.settings)
                if earlier is not None and config.intake.duplicates == "skip":
                    self._duplicate_of = earlier
                    self.stop(now)
                self._ledger.save(self.job)  # last: a disk that refuses it does not make a duplicate a new dataset

    def _on_checked(self, checked: events.Checked, job_id: str) -> None:
        """Says each thing once: the second preflight of a job repeats the first."""
        self._metrics.checked(checked)
        before, self._said, self.checked = self._said, checked, checked
        for gpu in checked.gpus if checked.gpus != before.gpus else ():
            log.info("job %s: GPU %d%s: %s", job_id, gpu.index, " (chosen)" * gpu.is_chosen, describe_gpu(gpu))
        for check in checked.checks:
            if check.status in ("warn", "fail") and check not in before.checks:
                log.warning("job %s: %s: %s. %s", job_id, check.name, check.message, check.remedy)
        if checked.fallback and checked.fallback != before.fallback:
            log.warning("job %s: trains on the CPU, since the GPU is not fit for it: %s", job_id, checked.fallback)

    def _enter_stage(self, name: str, now: float) -> None:
        if self.stage:
            self._metrics.stage_ended(self.stage, now - self._stage_at)
        self.stage, self._stage_at = name, now

    def _end(self, outcome: Outcome, config: Config, now: float) -> None:
        job, self.job = self.job, None
        assert job is not None
        if outcome.error is None:
            self._enter_stage("", now)
        self._metrics.worker_ended(outcome.exit_reason, outcome.peak_bytes)
        if self._duplicate_of:
            self._filing.finish_duplicate(job, self._duplicate_of)
        elif outcome.error is None or self._ledger.candidate(job.id) is not None:
            self._machine_works()
            self._ledger.save(advance(job, JobState.TRAINED, datetime.now(UTC)))
            candidate = self._ledger.candidate(job.id)
            if candidate is not None:
                self._metrics.trained(candidate.training)
        else:
            job = msgspec.structs.replace(job, sha256=outcome.sha256 or job.sha256)
            self._after_error(job, outcome.error, config, now)

    def _after_error(self, job: Job, error: RetraindError, config: Config, now: float) -> None:
        has_room = disks.has_room(self._ledger.state_dir, config.limits.min_free_bytes)
        step = schedule.next_step(job, error, config, self._num_deferrals, has_room=has_room)
        job = advance(
            job,
            step.state,
            datetime.now(UTC),
            attempts=step.attempts,
            reason=step.reason,
            batch_size=step.batch_size,
            precision=step.precision,
        )
        if step.holds_queue:
            self._num_deferrals += 1
            self._queue.hold_until = now + step.pause_seconds
            self._faults.show(_FAULT_OF_CODE.get(error.code, "worker"), error.message)
        else:
            self._machine_works()
        if job.state is JobState.QUARANTINED:
            self._filing.finish(job)
            return
        self._ledger.save(job)
        if not step.holds_queue:
            self._queue.retry_at(job.id, now + step.pause_seconds)
        if job.state is JobState.DEFERRED:
            self._metrics.retried(error.disposition)
            log.warning("job %s: %s: %s; next try in %.0f s", job.id, job.name, error, step.pause_seconds)
        else:
            log.info("job %s: %s goes back to the queue: %s", job.id, job.name, error.message)

    def close(self) -> None:
        """Ends what waits without a job."""
        self.ready.close()

    def _machine_works(self) -> None:
        self._num_deferrals = 0
        self._faults.heal(*OF_WORKER)
