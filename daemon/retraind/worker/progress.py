"""What a run of training has done so far, and what is told of it while it goes on.

Owns the counts of rows, steps and epochs and the loss of the current epoch, which stays on the device until it is
reported. Never trains. Raises TrainingError non_finite_loss and diverged, and what its listener raises.
"""

import math
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from retraind import events
from retraind.errors import TrainingError
from retraind.worker.warm_start import FirstWeights


class Listener(Protocol):
    """Whom training tells how it goes; any of these may raise to stop it between two steps."""

    def beat(self, done_share: float | None = None) -> None: ...
    def is_progress_due(self) -> bool: ...
    def progress(self, progress: events.Progress) -> None: ...
    def send(self, event: events.Event) -> None: ...


class Run:
    """What a run has done so far: rows, steps, the loss of the current epoch on the device, and what is told of it."""

    def __init__(
        self, num_rows: int, num_epochs: int, device: torch.device, listener: Listener, first: FirstWeights
    ) -> None:
        self.first_version, self.no_first_version = first.version, first.why_not
        self.epoch_losses: list[float] = []
        self.heldout_losses: list[float] = []
        self.num_steps = 0
        self.num_batches = 0  # of the current epoch
        self.num_resumes = 0
        self._started_at = time.monotonic()
        self._seconds_before = 0.0  # of the attempts that this one goes on from
        self._num_rows_done = 0
        self._num_rows_total = num_rows * num_epochs
        self._num_epochs = num_epochs
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
            "heldout_losses": self.heldout_losses,
            "num_steps": self.num_steps,
            "num_batches": self.num_batches,
            "num_resumes": self.num_resumes,
            "num_rows_done": self._num_rows_done,
            "num_epoch_rows": self._num_epoch_rows,
            "loss_sum": self._loss_sum,
            "seconds": self.seconds,
            "first_version": self.first_version,
            "no_first_version": self.no_first_version,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from there: one resume more."""
        self.epoch_losses, self.heldout_losses = state["epoch_losses"], state["heldout_losses"]
        self.num_steps, self.num_batches = state["num_steps"], state["num_batches"]
        self.num_resumes = state["num_resumes"] + 1
        self._num_rows_done, self._num_epoch_rows = state["num_rows_done"], state["num_epoch_rows"]
        self._loss_sum.copy_(state["loss_sum"])
        self._seconds_before = state["seconds"]
        # What was live when training began: by now another version may be.
        self.first_version, self.no_first_version = state["first_version"], state["no_first_version"]

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
