"""What is owed after training: the gate's verdict, the publication, and the dataset's last move.

A trained job is published before anything else is trained, in order; an ended job is written down before its file is
moved, so after a crash only the move is repeated. Raises PublishError and OSError: the loop waits and calls again.
"""

import logging
import time
from datetime import UTC, datetime
from pathlib import Path

from retraind.column_rules import HeldTo
from retraind.config import Config, DataConfig
from retraind.errors import PublishError
from retraind.job import Job, JobState, Reason, advance
from retraind.report import Candidate, Criterion
from retraind.supervisor import drift, gate, versions
from retraind.supervisor.build import CandidateDamaged
from retraind.supervisor.history import sequence_of
from retraind.supervisor.hook import Hook
from retraind.supervisor.ledger import Ledger
from retraind.supervisor.metrics import Metrics
from retraind.supervisor.publish import Publisher
from retraind.supervisor.spool import Spool

log = logging.getLogger(__name__)


class Filing:
    """Trained jobs on their way to the models directory, ended ones on their way to done/ or quarantine/."""

    def __init__(self, spool: Spool, ledger: Ledger, publisher: Publisher, hook: Hook, metrics: Metrics) -> None:
        self._spool, self._ledger, self._publisher, self._metrics = spool, ledger, publisher, metrics
        self._hook = hook
        self._live: str | None = None  # the version that is known to be live, None before the first look
        self.unfiled: dict[str, Job] = {}

    def trained(self) -> Job | None:
        """The oldest job whose candidate waits for publication."""
        found = (job for job in self._ledger.open_jobs.values() if job.state is JobState.TRAINED)
        return min(found, key=lambda job: job.id, default=None)

    @property
    def is_owed(self) -> bool:
        """True while something waits here."""
        return bool(self.unfiled) or self.trained() is not None

    def held_to(self, data: DataConfig) -> HeldTo | None:
        """The metrics of the live version, where the next dataset must have them."""
        return versions.held_to(self._publisher.live(), data)

    def publish(self, config: Config) -> None:
        """Judges and publishes the oldest trained job, if there is one. Raises PublishError."""
        job = self.trained()
        if job is None:
            return
        candidate = self._ledger.candidate(job.id)
        if candidate is None:
            self._train_again(job, "its candidate is gone or damaged")
            return
        # The worker's word that it has read the file may have been lost with the service, or with a full disk.
        earlier = self._ledger.published_before(candidate.dataset.sha256, job.settings)
        if earlier is not None and config.intake.duplicates == "skip":
            self.finish_duplicate(job, earlier)
            return
        self._tell_drift(job, candidate)
        criteria = gate.judge(candidate, config.gate)
        if reasons := gate.objections(criteria):
            message = "; ".join(reason.message for reason in reasons[:5])
            reason = Reason(code=reasons[0].code, message=message)
            self.finish(advance(job, JobState.REJECTED, datetime.now(UTC), reason=reason))
            return
        self._publish(job, candidate, criteria, config)

    def _tell_drift(self, job: Job, candidate: Candidate) -> None:
        found = candidate.evaluation.drift
        self._metrics.drift_seen(found)
        if found is not None and drift.has_drifted(found):
            log.warning("job %s: the data has drifted, or a fault lasts in it: %s", job.id, drift.told(found))

    def _publish(self, job: Job, candidate: Candidate, criteria: list[Criterion], config: Config) -> None:
        started_at = time.monotonic()
        weights = self._ledger.work_dir(job.id) / "weights.pt"
        try:
            now, sign = datetime.now(UTC), config.publish.sign
            live = config.gate.makes_live
            manifest = self._publisher.publish(candidate, weights, job.id, now, sign, criteria, live=live)
        except CandidateDamaged as error:
            self._train_again(job, str(error))
            return
        self._metrics.stage_ended("publish", time.monotonic() - started_at)
        if self._publisher.live_version() == manifest.version:
            self._live = manifest.version
            self._metrics.published(manifest)
        version_dir = self._publisher.versions_dir / manifest.version
        if live:  # before the record: a crash in between publishes again, which changes nothing, and owes it again
            self._hook.owe(config.publish, manifest.version, manifest.weights_sha256, version_dir)
        changes = {"version": manifest.version, "sha256": candidate.dataset.sha256, "reason": None}
        self.finish(advance(job, JobState.PUBLISHED, datetime.now(UTC), **changes))
        evaluation = manifest.evaluation
        log.info(
            "job %s: published %s from %s, held-out loss %.4g (predicting the mean: %.4g)%s",
            *(job.id, manifest.version, job.name, evaluation.heldout_loss, evaluation.mean_loss),
            "" if live else f"; it waits for `retraind models promote {manifest.sequence}`",
        )
        self._prune(config)

    def _prune(self, config: Config) -> None:
        """What can not be removed now is removed after the next publication."""
        try:
            removed = self._publisher.prune(config.models.keep, datetime.now(UTC))
        except PublishError as error:
            log.warning("old versions are not removed: %s", error)
        else:
            if removed:
                log.info("removed beyond models.keep: %s", ", ".join(removed))

    def watch_live(self, config: Config) -> None:
        """Notices that another process has changed the live version, and lets it be. Costs one readlink."""
        version, before = self._publisher.live_version(), self._live
        if version == before:
            return
        self._live = version
        manifest = self._publisher.live()
        if manifest is not None:
            self._metrics.published(manifest)
        if before is None:
            self._metrics.drift_seen(manifest.evaluation.drift if manifest is not None else None)
            return
        is_older = sequence_of(version) < sequence_of(before)
        what = "rolled back" if is_older else "changed"
        log.warning(
            "the live version was %s by another process: %s, before %s", what, version or "none", before or "none"
        )
        if is_older:
            self._metrics.rolled_back()
        if manifest is not None:
            self._hook.owe(config.publish, version, manifest.weights_sha256, self._publisher.versions_dir / version)

    def _train_again(self, job: Job, why: str) -> None:
        log.error("job %s: %s: training again", job.id, why)
        self._ledger.fresh_work_dir(job.id)
        self._ledger.save(advance(job, JobState.QUEUED, datetime.now(UTC)))

    def finish_duplicate(self, job: Job, earlier: str) -> None:
        """Ends a job whose content the job `earlier` has published: the model stays, the file is archived."""
        reason = Reason(code="duplicate", message=f"job {earlier} published the same content with the same settings")
        self.finish(advance(job, JobState.DUPLICATE, datetime.now(UTC), reason=reason))

    def finish(self, job: Job) -> None:
        """The job's end, written down first; its dataset is moved by `file`."""
        self._ledger.save(job)
        self.unfiled[job.id] = job
        seconds = max(0.0, (job.updated_at - job.created_at).total_seconds())
        self._metrics.job_ended(job.state.value, job.reason.code if job.reason else "", seconds)
        if job.reason is not None:
            level = logging.INFO if job.state is JobState.DUPLICATE else logging.ERROR
            log.log(level, "job %s: %s %s: %s", job.id, job.name, job.state.value, job.reason)

    def file(self) -> None:
        """Moves the datasets of ended jobs to where they belong. Raises OSError; the rest is moved the next time."""
        for job in list(self.unfiled.values()):
            # Before the move, whose last step says that nothing is left to do for this job after a crash.
            self._ledger.free_work_dir(job)
            if job.state in (JobState.QUARANTINED, JobState.REJECTED):
                assert job.reason is not None
                self._spool.quarantine(job.id, job.reason, sha256=job.sha256, attempts=job.attempts)
            elif self._was_written_to(job):
                log.warning("job %s: %s was written to after it was read: it is a new dataset", job.id, job.name)
                self._spool.give_back(job.id)
            else:
                self._spool.archive(job.id)
            del self.unfiled[job.id]
            self._ledger.close()

    def _was_written_to(self, job: Job) -> bool:
        """A producer may hold the file open longer than the quiet window and where leases do not tell."""
        source = self._spool.dataset(job.id)
        if source is None or not job.mtime_ns:
            return False
        info = Path(source.decode("utf-8", "surrogateescape")).lstat()
        return (info.st_size, info.st_mtime_ns) != (job.num_bytes, job.mtime_ns)
