"""`retraind train FILE...`: one job in the foreground, through the worker, the gate and the publisher of the service.

Needs no spool and no state directory: its work lies in a temporary directory that is gone afterwards. An attempt after
a crash of the worker goes on from the checkpoint there; a run that is ended leaves none.
"""

import secrets
import select
import signal
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from retraind import events, typed_json
from retraind.column_rules import HeldTo
from retraind.commands import screen
from retraind.config import Config
from retraind.errors import PublishError
from retraind.job import Job, JobState, Order
from retraind.printable import printable
from retraind.report import Candidate, Manifest
from retraind.supervisor import drift, gate, schedule, status, versions
from retraind.supervisor.build import CandidateDamaged
from retraind.supervisor.child import Child, Outcome
from retraind.supervisor.publish import WAIT_SECONDS, Publisher

EXIT_REJECTED = 1


def train(config: Config, files: list[Path], *, as_json: bool) -> int:
    """Trains on the files as one dataset and publishes; 0, 1 when the gate rejects, else the error's exit status."""
    publisher = Publisher(config.models.dir, config.models.name, WAIT_SECONDS)
    publisher.open()
    job = new_job(files, datetime.now(UTC))
    with tempfile.TemporaryDirectory(prefix="retraind-") as work:
        order = _order(job, config, files, Path(work), versions.held_to(publisher.live(), config.data))
        _attempt_until_done(job, config, order, quiet=as_json)
        candidate = typed_json.decode((Path(work) / "candidate.json").read_bytes(), Candidate)
        found = candidate.evaluation.drift
        if found is not None and drift.has_drifted(found):
            screen.complain(f"the data has drifted, or a fault lasts in it: {drift.told(found)}")
        criteria = gate.judge(candidate, config.gate)
        if reasons := gate.objections(criteria):
            screen.complain("rejected by the gate: " + "; ".join(reason.message for reason in reasons))
            return EXIT_REJECTED
        try:
            weights, now = Path(work) / "weights.pt", datetime.now(UTC)
            live = config.gate.makes_live
            manifest = publisher.publish(candidate, weights, job.id, now, config.publish.sign, criteria, live=live)
        except CandidateDamaged as error:
            raise PublishError("models_dir_unwritable", str(error)) from error
    try:
        publisher.prune(config.models.keep, now)
    except PublishError as error:
        screen.complain(f"old versions are not removed: {error}")
    _print(manifest, publisher, as_json=as_json)
    return 0


def new_job(files: list[Path], now: datetime) -> Job:
    """A job that runs. Its id is its own: a publication is found again by it, also beside another run's."""
    name = printable(files[0].name) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    job_id = f"{now:%Y%m%dT%H%M%SZ}-train-{secrets.token_hex(4)}"
    return Job(id=job_id, name=name, state=JobState.RUNNING, created_at=now, updated_at=now, attempts=1)


def _order(job: Job, config: Config, files: list[Path], work: Path, held: HeldTo | None) -> Order:
    return Order(
        job=job.id,
        attempt=job.attempts,
        datasets=[str(file) for file in files],
        work_dir=str(work),
        socket=str(work / "events.sock"),
        device=config.device,
        training=config.training,
        data=config.data,
        preflight=config.preflight,
        log_level=config.log.level if config.log.level != "info" else "warning",  # progress says the rest
        published=str(Path(config.models.dir) / config.models.name),
        held_to=held,
    )


def _attempt_until_done(job: Job, config: Config, order: Order, *, quiet: bool) -> None:
    """Attempts by the service's own table of dispositions, without its pauses. Raises the error that ends the job."""
    while True:
        error = _attempt(job, config, order, quiet=quiet).error
        if error is None:
            return
        step = schedule.next_step(job, error, config, 0)
        if step.state is not JobState.DEFERRED or step.attempts < job.attempts:  # what is waited for is not the job
            raise error
        screen.complain(f"trying again: {error}")
        changes = {"batch_size": step.batch_size, "precision": step.precision, "attempts": step.attempts + 1}
        job = msgspec.structs.replace(job, **changes)


def _attempt(job: Job, config: Config, order: Order, *, quiet: bool) -> Outcome:
    training = schedule.lowered(config.training, job)
    order = msgspec.structs.replace(order, attempt=job.attempts, training=training)
    child = Child(order, config.worker)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: child.stop(time.monotonic()))
    try:
        child.start(time.monotonic())
        with screen.JobProgress(job.name, quiet=quiet) as progress:
            return _watch(child, job.name, progress)
    finally:
        child.close()


def _watch(child: Child, name: str, progress: screen.JobProgress) -> Outcome:
    stage = ""
    while True:
        poller = select.poll()
        for fd in child.fds():
            poller.register(fd, select.POLLIN)
        poller.poll(max(0.0, min(child.next_deadline() - time.monotonic(), 1.0)) * 1000 + 1)
        for event in child.read(time.monotonic()):
            stage = event.name if isinstance(event, events.Stage) else stage
            progress.show(event, status.describe_work(name, stage, event))
            if isinstance(event, events.Checked) and event.fallback:
                screen.complain(f"trains on the CPU, since the GPU is not fit for it: {event.fallback}")
        outcome = child.poll(time.monotonic())
        if outcome is not None:
            return outcome


def _print(manifest: Manifest, publisher: Publisher, *, as_json: bool) -> None:
    if as_json:
        screen.print_json(manifest)
        return
    training, evaluation = manifest.training, manifest.evaluation
    took = (
        f"{training.epochs} epochs in {training.seconds:.1f} s on {training.device_name} ({training.precision}), "
        f"{training.rows_per_second:,.0f} rows/s"
    )
    dropped = sum(manifest.dataset.num_dropped.values())
    baselines = f"predicting the mean: {evaluation.mean_loss:.4g}"
    if evaluation.pca_loss is not None:
        baselines += f", principal components: {evaluation.pca_loss:.4g}"
    screen.print_facts(
        [
            ("published", manifest.version),
            (
                ("weights", publisher.link)
                if publisher.live_version() == manifest.version
                else ("not live", f"until `retraind models promote {manifest.sequence}`")
            ),
            ("rows", f"{manifest.dataset.num_rows:,} used, {dropped:,} dropped"),
            ("metrics", len(manifest.metric_names)),
            ("training", took),
            ("held-out loss", f"{evaluation.heldout_loss:.4g} ({baselines})"),
        ]
    )  # fmt: skip
