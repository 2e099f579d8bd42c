"""One job from its order to a candidate on disk, as a process of its own.

Owns the order of the stages, the two files of the result, and the last event with the exit status that goes with it.
Never publishes and never touches the dataset. Unless it was kept ready, torch is imported after the dataset proved
readable, so that a bad file costs no import. Errors of the tree become a `failed` event; anything else is a crash, with
its traceback in the log.
"""

import errno
import faulthandler
import hashlib
import importlib
import logging
import os
import platform
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec

import retraind
from retraind import config, events, fsio, logs, report, typed_json
from retraind.errors import DataError, HostError, Interrupted, ResourceError, RetraindError, UsageError
from retraind.job import CHECKPOINT_NAME, Order
from retraind.worker import gpu_machine, preflight, ready
from retraind.worker.emit import Emitter, die_with_parent

if TYPE_CHECKING:
    from retraind.worker.ingest import Ingested

log = logging.getLogger(__name__)

WEIGHTS_NAME = "weights.pt"
CANDIDATE_NAME = "candidate.json"
# Python's own status for an exception that nobody caught; no family has it, so the supervisor sees a crash.
EXIT_CRASHED = 1


def main(arguments: list[str]) -> int:
    """Does the job whose order is the only argument, or the one that a worker kept ready is given. The exit status."""
    if len(arguments) != 1:
        print(f"usage: python -m retraind.worker ORDER.json | {events.READY_ARGUMENT}", file=sys.stderr)
        return UsageError.exit_status
    faulthandler.enable()  # SIGABRT leaves the stacks of all threads in the log
    parent = os.getppid()
    die_with_parent()
    # A terminal's Ctrl-C reaches the supervisor as well, and it says SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order_path: Path | None = Path(arguments[0])
    if arguments[0] == events.READY_ARGUMENT:
        try:
            order_path = ready.wait_for_order()
        except (ImportError, OSError) as error:  # a job would say it with more words, and is started without this one
            logs.setup("info")
            log.info("a worker of %s can not be kept ready: %s", sys.executable, error)
            return HostError.exit_status
    return 0 if order_path is None else obey(order_path, parent)


def obey(order_path: Path, parent: int) -> int:
    """Does the job, for a supervisor that is still there. Returns the exit status."""
    order = typed_json.decode(order_path.read_bytes(), Order)
    logs.setup(order.log_level, job=order.job)
    try:
        # A parent that died before it could be died with left no listener, or another parent.
        emitter = Emitter(Path(order.socket), job=order.job, attempt=order.attempt)
    except OSError as error:
        log.warning("no supervisor at %s: %s", order.socket, error)
        return Interrupted.exit_status
    with emitter:
        signal.signal(signal.SIGTERM, emitter.terminate)
        if os.getppid() != parent:
            return Interrupted.exit_status
        return answer(order, emitter)


def answer(order: Order, emitter: Emitter) -> int:
    """Runs the job and sends exactly one last event, unless it crashes or nobody listens."""
    try:
        with system_errors_named():
            finished = work(order, emitter)
        emitter.send(finished)
    except RetraindError as error:
        log.debug("%s", error)  # the supervisor says it, once, with what becomes of the job
        return fail(error, emitter, _refused_sha256(error, order, emitter))
    except Exception:
        log.exception("crashed")
        return EXIT_CRASHED
    return 0


def _refused_sha256(error: RetraindError, order: Order, emitter: Emitter) -> str:
    """Identifies a refused dataset; one that is too large, or that can not be read now, is not read for it."""
    if not isinstance(error, DataError) or error.code == "too_large":
        return ""
    from retraind.worker.ingest import sha256_of_dataset  # noqa: PLC0415  (readers may be missing)

    try:
        return sha256_of_dataset([Path(dataset) for dataset in order.datasets], emitter.beat)
    except (OSError, RetraindError):
        return ""


def fail(error: RetraindError, emitter: Emitter, sha256: str = "") -> int:
    """Tells the supervisor why; when it is gone the exit status has to do."""
    failed = events.Failed(
        code=error.code,
        message=error.message,
        line=error.line,
        column=error.column,
        remedy=error.remedy,
        sha256=sha256,
    )
    try:
        emitter.send(failed)
    except Interrupted:
        return Interrupted.exit_status
    return error.exit_status


def work(order: Order, emitter: Emitter) -> events.Finished:
    """The job: from here on every line is a step that an operator can see in the events."""
    work_dir = Path(order.work_dir)
    emitter.send(events.Hello(pid=os.getpid(), python=platform.python_version()))

    emitter.send(events.Stage(name="preflight"))
    found = preflight.run(order.device, work_dir, Path(order.socket).parent, order.training, order.preflight)
    tell(found, emitter)
    preflight.expose(found)

    emitter.send(events.Stage(name="ingest"))
    load("retraind.worker.ingest", "no_numpy")
    from retraind.worker.ingest import ingest  # noqa: PLC0415  (it needs numpy and pandas)

    datasets = [Path(dataset) for dataset in order.datasets]
    ingested = ingest(datasets, work_dir, order.data, emitter.beat, order.held_to)
    try:
        emitter.send(events.Ingested(dataset=ingested.dataset))
        found = complete(found, emitter)
        learned = learn(msgspec.structs.replace(order, device=found.device), ingested, work_dir, emitter)
    finally:
        ingested.rows.path.unlink(missing_ok=True)  # as large as the dataset, and made anew by the next attempt

    candidate = msgspec.structs.replace(learned, checks=found.checks, gpus=found.gpus)
    # The weights lie on disk already. From the next line's return on, a power cut loses nothing of this job.
    fsio.write_atomic(work_dir / CANDIDATE_NAME, msgspec.json.encode(candidate))
    (work_dir / CHECKPOINT_NAME).unlink(missing_ok=True)  # one that a crash leaves here goes with the job
    return events.Finished(weights_sha256=candidate.weights_sha256, peak_bytes=preflight.peak_bytes())


def tell(found: preflight.Found, emitter: Emitter) -> None:
    """Says what was found, and raises HostError when the job can not go on with it."""
    emitter.send(events.Checked(checks=found.checks, gpus=found.gpus, fallback=found.fallback))
    preflight.require(found)


def complete(found: preflight.Found, emitter: Emitter) -> preflight.Found:
    """Loads torch, and lets it answer what only torch can, where CUDA would be used."""
    emitter.send(events.Stage(name="import"))
    preflight.require_torch(str(load("torch", "no_torch").__version__))
    if found.owes_context:
        from retraind.worker import cuda_context  # noqa: PLC0415  (it needs torch)

        found = found.with_context(cuda_context.look(1 if found.cuda_device else None))
        tell(found, emitter)
    return found


def learn(order: Order, ingested: "Ingested", work_dir: Path, emitter: Emitter) -> report.Candidate:
    """Trains, evaluates, writes the weights durably and describes what they read back as."""
    from retraind.worker import checkpoint, compare, evaluate, model, scorer, train, warm_start  # noqa: PLC0415  (torch)
    from retraind.worker.rows import RowRange, split_rows  # noqa: PLC0415

    emitter.send(events.Stage(name="train"))
    device = train.choose_device(order.device)
    cache = ingested.rows
    rows = RowRange(
        cache.path, cache.num_metrics, 0, cache.num_rows, order.training.window, cache.breaks, cache.has_missing
    )
    training_rows, heldout_rows = split_rows(rows, order.training.holdout_share)
    checkpoints = None
    if order.training.checkpoint_seconds is not None:
        identity = checkpoint.identity_of(
            job=order.job,
            dataset=ingested.dataset.sha256,
            metric_names=ingested.dataset.metric_names,
            num_rows=training_rows.num_rows,
            device=device.type,
            precision=train.precision_in_force(order.training, device),
            training=config.decisive(order.training),
            data=order.data,
        )
        checkpoints = checkpoint.Checkpoints(work_dir / CHECKPOINT_NAME, identity, order.training.checkpoint_seconds)
    first = warm_start.FirstWeights()
    if order.training.warm_start and order.published:
        first = warm_start.first_weights(
            Path(order.published), ingested.dataset, ingested.scaler, order.training.window
        )
        log.info("first weights: %s", first.version or f"drawn: {first.why_not}")
    trained, training = train.train(training_rows, order.training, device, emitter, checkpoints, heldout_rows, first)

    emitter.send(events.Stage(name="evaluate"))
    trained_scorer = scorer.fit_scorer(trained, training_rows, device, emitter.beat)
    evaluation = evaluate.evaluate(
        trained_scorer, training_rows, heldout_rows, ingested.dataset.metric_names, emitter.beat,
        false_alarm_share=order.training.false_alarm_share,
    )  # fmt: skip
    if order.published:
        comparison, drift, why_not = compare.compare(
            Path(order.published), trained_scorer, ingested.dataset, ingested.scaler, rows, heldout_rows, emitter.beat
        )
        evaluation = msgspec.structs.replace(evaluation, comparison=comparison, drift=drift, no_comparison=why_not)
    weights, beside = model.serialise(trained), scorer.serialise(trained_scorer)
    sha256 = hashlib.sha256(weights).hexdigest()
    fsio.write_atomic(work_dir / WEIGHTS_NAME, weights)
    fsio.write_atomic(work_dir / scorer.SCORER_NAME, beside)
    evaluate.require_same_answers(work_dir / WEIGHTS_NAME, trained, heldout_rows or training_rows)
    return report.Candidate(
        weights_sha256=sha256,
        weights_bytes=len(weights),
        shape=model.shape_of(rows.input_dim, rows.window),
        dataset=ingested.dataset,
        scaler=ingested.scaler,
        training=training,
        evaluation=evaluation,
        tensors=evaluate.read_back(work_dir / WEIGHTS_NAME, sha256, rows.input_dim),
        expected=model.expected_tensors(rows.input_dim),
        versions=versions(),
        siblings=[
            report.SiblingFile(
                name=scorer.SCORER_NAME, sha256=hashlib.sha256(beside).hexdigest(), num_bytes=len(beside)
            )
        ],
    )


def load(module: str, code: str) -> ModuleType:
    """Imports what this interpreter may lack, or have broken; it takes seconds. Raises HostError with the code."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a shared library of torch's that can not be loaded
        raise HostError(
            code,
            f"{sys.executable} can not import {module}: {error}",
            remedy="install it there, or set worker.python to an interpreter with torch, numpy, pandas and msgspec",
        ) from error


@contextmanager
def system_errors_named() -> Iterator[None]:
    """Gives the two errors that any stage may meet their place in the error tree; all others pass."""
    try:
        yield
    except MemoryError as error:
        raise ResourceError(
            "out_of_memory", "no memory left on the host", remedy="give the service more, or lower training.batch_size"
        ) from error
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        place = f" for {error.filename}" if error.filename else ""
        raise HostError(
            "disk_full", f"no space left{place}: {error.strerror}", remedy="free space below state.dir"
        ) from error


def versions() -> dict[str, str]:
    """What computed the weights; empty for what is not there."""
    import numpy as np  # noqa: PLC0415  (both loaded long since)
    import torch  # noqa: PLC0415

    return {
        "retraind": retraind.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "numpy": np.__version__,
        "driver": gpu_machine.driver_version(preflight.sysroot()),
    }
