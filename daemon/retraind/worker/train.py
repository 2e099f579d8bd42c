"""The training loop: an autoencoder, epochs of batches, one step a batch, the held-out error after each epoch.

Owns the choice of device and precision, and when a run's state is kept; how long is budget's, a step is step's, a
checkpoint checkpoint's, what is told of it progress's. Never touches files other than the rows it is given. Raises
TrainingError, ResourceError out_of_memory, HostError preflight_failed, and what its listener raises.
"""

# B batch, F = window x metrics
# ruff: noqa: N806  (tensors carry their shape)

import contextlib
import logging
import platform
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from retraind import events, report
from retraind.config import Device, Precision, TrainingConfig
from retraind.errors import HostError, Interrupted, ResourceError, TrainingError
from retraind.worker.batches import Batches
from retraind.worker.budget import Best, budget_for
from retraind.worker.checkpoint import Checkpoints
from retraind.worker.evaluate import watched_loss
from retraind.worker.model import TelemetryAutoencoder, build
from retraind.worker.progress import Listener, Run
from retraind.worker.rows import RowRange
from retraind.worker.step import Step, make_step
from retraind.worker.warm_start import FirstWeights

log = logging.getLogger(__name__)


def choose_device(requested: Device) -> torch.device:
    """The device to train on. Raises HostError preflight_failed when CUDA is asked for and torch has none."""
    has_cuda = requested != "cpu" and torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        raise HostError(
            "preflight_failed",
            f"device is cuda, but torch {torch.__version__} finds no CUDA device",
            remedy="install a CUDA build of torch and a driver that fits it, or set device: auto",
        )
    return torch.device("cuda" if has_cuda else "cpu")


def choose_precision(requested: Precision, device_type: str, capability: tuple[int, int]) -> Precision:
    """What `auto` means: bf16 from Ampere on (8.0), fp16 on Volta and Turing (7.x), float32 elsewhere.

    By compute capability, since torch calls bf16 supported where it is only emulated. On a CPU bf16 is five times
    slower than float32 for a net this small.
    """
    if requested != "auto":
        return requested
    if device_type != "cuda" or capability < (7, 0):
        return "float32"
    return "bf16" if capability >= (8, 0) else "fp16"


def precision_in_force(training: TrainingConfig, device: torch.device) -> Precision:
    """What the configured precision means on this device."""
    return choose_precision(training.precision, device.type, capability_of(device))


def train(
    rows: RowRange,
    training: TrainingConfig,
    device: torch.device,
    listener: Listener,
    checkpoints: Checkpoints | None = None,
    heldout_rows: RowRange | None = None,
    first: FirstWeights = FirstWeights(),  # noqa: B008  (frozen)
) -> tuple[TelemetryAutoencoder, report.TrainingReport]:
    """Trains a fresh model on all of `rows` (at least two), or `first`, or one that `checkpoints` has the state of.

    With `epochs: auto` the weights of the epoch with the lowest error on `heldout_rows` are returned, else the last.
    On a CPU equal rows, settings and first weights give equal weights, however often training was broken off and gone
    on with. Raises TrainingError when the weights or the loss do not stay finite, ResourceError out_of_memory.
    """
    torch.set_num_threads(training.num_threads)
    precision = precision_in_force(training, device)
    budget = budget_for(rows.num_rows, training)
    with out_of_memory_as_resource_error(budget.batch_size):
        model = (first.network or build(rows.input_dim, training.seed)).to(device).train()
        step = make_step(model, training, precision, has_missing=rows.has_missing)
        batches = Batches(rows, budget.batch_size, seed=training.seed, device=device, num_workers=training.num_workers)
        run = Run(rows.num_rows, budget.num_epochs, device, listener, first)
        best = Best()
        keeper = Keeper(checkpoints, run, step, best, budget.num_epochs, listener)
        keeper.restore()
        with keeper.keeping_when_interrupted():
            while run.epoch <= budget.num_epochs and not (budget.stops_early and best.is_past):
                for x_BF in batches.epoch(run.epoch - 1, run.num_batches):
                    loss = step(x_BF)
                    run.step_done(loss, len(x_BF), was_skipped=step.was_skipped)
                    keeper.keep_when_due()
                run.epoch_done()
                if heldout_rows is not None:  # no listener is called from here to the next step: one piece
                    step.finish()
                    run.heldout_losses.append(watched_loss(model, heldout_rows, device))
                    best.look(run.heldout_losses[-1], model.state_dict())
        step.finish()
        if budget.stops_early and best.weights is not None:
            model.load_state_dict(best.weights)
        require_finite(model)
    return model, report.TrainingReport(
        epochs=len(run.epoch_losses),
        batch_size=budget.batch_size,
        num_steps=run.num_steps,
        epoch_losses=run.epoch_losses,
        heldout_losses=run.heldout_losses,
        seconds=run.seconds,
        rows_per_second=run.rows_per_second,
        device=device.type,
        device_name=device_name(device),
        precision=precision,
        seed=training.seed,
        num_skipped_steps=step.num_skipped,
        num_resumes=run.num_resumes,
        warm_start=run.first_version,
        no_warm_start=run.no_first_version,
    )


class Keeper:
    """Keeps the state of a run and its step, and brings it back; does nothing without checkpoints."""

    def __init__(
        self, checkpoints: Checkpoints | None, run: Run, step: Step, best: Best, num_epochs: int, listener: Listener
    ) -> None:
        self._checkpoints, self._run, self._step, self._best = checkpoints, run, step, best
        self._num_epochs, self._listener = num_epochs, listener

    def restore(self) -> None:
        state = self._checkpoints.read() if self._checkpoints else None
        if state is None:
            return
        self._step.restore(state["step"])
        self._run.restore(state["run"])
        self._best.restore(state["best"])
        epoch, num_steps = self._run.epoch, self._run.num_steps
        log.info("training goes on from a checkpoint: epoch %d of %d, step %d", epoch, self._num_epochs, num_steps)
        self._listener.send(events.Resumed(epoch=epoch, epochs=self._num_epochs, num_steps=num_steps))

    def keep_when_due(self) -> None:
        if self._checkpoints is not None and self._checkpoints.is_due():
            self._keep(self._checkpoints)

    @contextlib.contextmanager
    def keeping_when_interrupted(self) -> Iterator[None]:
        """SIGTERM is heard between two steps, after the last one was counted: its state is whole."""
        try:
            yield
        except Interrupted:
            if self._checkpoints is not None:
                self._keep(self._checkpoints)
            raise

    def _keep(self, checkpoints: Checkpoints) -> None:
        num_bytes = checkpoints.write(
            {"step": self._step.state(), "run": self._run.state(), "best": self._best.state()}
        )
        if num_bytes:
            self._listener.send(
                events.Checkpointed(
                    epoch=self._run.epoch,
                    epochs=self._num_epochs,
                    num_steps=self._run.num_steps,
                    num_bytes=num_bytes,
                )
            )


def require_finite(model: nn.Module) -> None:
    """Raises TrainingError diverged for a weight or a running statistic that is not finite."""
    broken = [name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]
    if broken:
        raise TrainingError("diverged", f"not finite after training: {', '.join(broken)}")


@contextlib.contextmanager
def out_of_memory_as_resource_error(batch_size: int) -> Iterator[None]:
    """Turns the ways in which torch says that memory ran out into ResourceError; other errors pass."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch raises a plain RuntimeError, with one of these texts for as long as it has existed.
        told = ("out of memory", "can't allocate memory", "not enough memory")
        if isinstance(error, MemoryError) or any(text in str(error) for text in told):
            message = (
                f"no memory left at batch size {batch_size}: {str(error).splitlines()[0] if str(error) else error!r}"
            )
            raise ResourceError("out_of_memory", message, remedy="lower training.batch_size") from error
        raise


def capability_of(device: torch.device) -> tuple[int, int]:
    """The CUDA compute capability, (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """The CPU's model as Linux reports it, or its architecture where it reports none (ARM)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()
