"""The training loop: a fresh autoencoder, epochs of batches, one step a batch, and what is told of it.

Owns the choice of device and precision, what a run reports of itself, and when its state is kept; a step is step's, a
checkpoint checkpoint's. Never touches files other than the rows it is given. The loss stays on the device and is read
when it is reported. Raises TrainingError, ResourceError out_of_memory, HostError preflight_failed, and what its
listener raises.
"""

# B batch, D metrics
# ruff: noqa: N806  (tensors carry their shape)

import contextlib
import logging
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retraind import events, report
from retraind.config import Device, Precision, TrainingConfig
from retraind.errors import HostError, Interrupted, ResourceError, TrainingError
from retraind.worker.batches import Batches, RowRange
from retraind.worker.checkpoint import Checkpoints
from retraind.worker.model import TelemetryAutoencoder, build
from retraind.worker.step import Step, make_step

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Whom training tells how it goes; any of these may raise to stop it between two steps."""

    def beat(self, done_share: float | None = None) -> None: ...
    def is_progress_due(self) -> bool: ...
    def progress(self, progress: events.Progress) -> None: ...
    def send(self, event: events.Event) -> None: ...


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


class Run:
    """What a run has done so far: rows, steps, the loss of the current epoch on the device, and what is told of it."""

    def __init__(self, num_rows: int, training: TrainingConfig, device: torch.device, listener: Listener) -> None:
        self.epoch_losses: list[float] = []
        self.num_steps = 0
        self.num_batches = 0  # of the current epoch
        self.num_resumes = 0
        self._started_at = time.monotonic()
        self._seconds_before = 0.0  # of the attempts that this one goes on from
        self._num_rows_done = 0
        self._num_rows_total = num_rows * training.epochs
        self._num_epochs = training.epochs
        self._device = device
        self._listener = listener
        self._num_epoch_rows = 0
        # float64, since float32 stops adding up after some ten thousand batches.
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def epoch(self) -> int:
        """The current one, from 1."""
        return len(self.epoch_losses) + 1

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started_at

    @property
    def rows_per_second(self) -> float:
        return self._num_rows_done / max(self.seconds, 1e-9)

    def step_done(self, loss: Tensor, num_rows: int, *, was_skipped: bool) -> None:
        """Adds a batch's mean loss without waiting for it, and reports when that is due."""
        self.num_steps += 1
        self.num_batches += 1
        self._num_rows_done += num_rows
        if not was_skipped:  # its loss is infinite, and its update did not happen
            self._num_epoch_rows += num_rows
            self._loss_sum.add_(loss.detach(), alpha=num_rows)
        self._listener.beat(self._num_rows_done / self._num_rows_total)
        if self._listener.is_progress_due():
            self._report(self._read_loss() if self._num_epoch_rows else None)

    def epoch_done(self) -> None:
        """Closes the epoch and reports it; this waits for the device. Raises TrainingError when it taught nothing."""
        if not self._num_epoch_rows:
            raise TrainingError("diverged", f"fp16 gradients overflow: every step of epoch {self.epoch} was skipped")
        loss = self._read_loss()
        self._report(loss)
        self.epoch_losses.append(loss)
        self._loss_sum.zero_()
        self._num_epoch_rows = self.num_batches = 0

    def state(self) -> dict[str, Any]:
        """What has been done so far, between any two steps."""
        return {
            "epoch_losses": self.epoch_losses,
            "num_steps": self.num_steps,
            "num_batches": self.num_batches,
            "num_resumes": self.num_resumes,
            "num_rows_done": self._num_rows_done,
            "num_epoch_rows": self._num_epoch_rows,
            "loss_sum": self._loss_sum,
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from there: one resume more."""
        self.epoch_losses = state["epoch_losses"]
        self.num_steps, self.num_batches = state["num_steps"], state["num_batches"]
        self.num_resumes = state["num_resumes"] + 1
        self._num_rows_done, self._num_epoch_rows = state["num_rows_done"], state["num_epoch_rows"]
        self._loss_sum.copy_(state["loss_sum"])
        self._seconds_before = state["seconds"]

    def _read_loss(self) -> float:
        """The mean loss of this epoch's rows so far. Raises TrainingError non_finite_loss."""
        loss = self._loss_sum.item() / self._num_epoch_rows
        if not math.isfinite(loss):
            raise TrainingError("non_finite_loss", f"the loss became {loss} in epoch {self.epoch}")
        return loss

    def _report(self, loss: float | None) -> None:
        num_rows_left = self._num_rows_total - self._num_rows_done
        self._listener.progress(
            events.Progress(
                epoch=self.epoch,
                epochs=self._num_epochs,
                loss=loss,
                rows_per_second=self.rows_per_second,
                seconds_left=num_rows_left / self.rows_per_second,
                device=self._device.type,
            )
        )


def train(
    rows: RowRange,
    training: TrainingConfig,
    device: torch.device,
    listener: Listener,
    checkpoints: Checkpoints | None = None,
) -> tuple[TelemetryAutoencoder, report.TrainingReport]:
    """Trains a fresh model on all of `rows` (at least two), or one that `checkpoints` has the state of.

    On a CPU equal rows and settings give equal weights, however often training was broken off and gone on with. Raises
    TrainingError when the weights or the loss do not stay finite, ResourceError out_of_memory.
    """
    torch.set_num_threads(training.num_threads)
    precision = precision_in_force(training, device)
    with out_of_memory_as_resource_error(training.batch_size):
        model = build(rows.num_metrics, training.seed).to(device).train()
        step = make_step(model, training, precision)
        batches = Batches(
            rows, training.batch_size, seed=training.seed, device=device, num_workers=training.num_workers
        )
        run = Run(rows.num_rows, training, device, listener)
        keeper = Keeper(checkpoints, run, step, training.epochs, listener)
        keeper.restore()
        with keeper.keeping_when_interrupted():
            while run.epoch <= training.epochs:
                for x_BD in batches.epoch(run.epoch - 1, run.num_batches):
                    loss = step(x_BD)
                    run.step_done(loss, len(x_BD), was_skipped=step.was_skipped)
                    keeper.keep_when_due()
                run.epoch_done()
        step.finish()
        require_finite(model)
    return model, report.TrainingReport(
        epochs=training.epochs,
        batch_size=training.batch_size,
        num_steps=run.num_steps,
        epoch_losses=run.epoch_losses,
        seconds=run.seconds,
        rows_per_second=run.rows_per_second,
        device=device.type,
        device_name=device_name(device),
        precision=precision,
        seed=training.seed,
        num_skipped_steps=step.num_skipped,
        num_resumes=run.num_resumes,
    )


class Keeper:
    """Keeps the state of a run and its step, and brings it back; does nothing without checkpoints."""

    def __init__(
        self, checkpoints: Checkpoints | None, run: Run, step: Step, num_epochs: int, listener: Listener
    ) -> None:
        self._checkpoints, self._run, self._step = checkpoints, run, step
        self._num_epochs, self._listener = num_epochs, listener

    def restore(self) -> None:
        state = self._checkpoints.read() if self._checkpoints else None
        if state is None:
            return
        self._step.restore(state["step"])
        self._run.restore(state["run"])
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
        num_bytes = checkpoints.write({"step": self._step.state(), "run": self._run.state()})
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
