"""How long to train: batch size and epochs from the number of rows, and when the held-out error says enough.

Five epochs of 2048 rows are 60 steps on a machine's two weeks of minutes: a net has then hardly left its first weights.
`training.epochs: auto` counts in steps instead; a number is taken as it stands, with the batch size as it stands.
Pure but for the copies of the best weights. Raises nothing.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from retraind.config import TrainingConfig

# What is enough for the shapes that telemetry has: on labelled sets, three times as many found no more.
ENOUGH_STEPS = 1000
MIN_EPOCHS = 5
# Small files get small batches, so that an epoch has some tens of steps and the held-out error is looked at as often.
STEPS_PER_EPOCH = 40
SMALLEST_BATCH = 32
# Epochs without a better held-out error, after the first MIN_EPOCHS.
PATIENCE = 6
# Below it a net learns these very rows by heart, whatever the number of steps.
FEW_ROWS = 300


@dataclass(frozen=True)
class Budget:
    """Rows in a step, epochs at most, and whether the held-out error may end training sooner."""

    batch_size: int
    num_epochs: int
    stops_early: bool


def budget_for(num_rows: int, training: TrainingConfig) -> Budget:
    """The budget of a training on so many rows."""
    if training.epochs != "auto":
        return Budget(training.batch_size, training.epochs, stops_early=False)
    fitting = 2 ** int(math.log2(max(1, num_rows / STEPS_PER_EPOCH)))
    batch_size = min(training.batch_size, max(SMALLEST_BATCH, fitting))
    num_steps = max(1, num_rows // batch_size)
    return Budget(batch_size, max(MIN_EPOCHS, math.ceil(ENOUGH_STEPS / num_steps)), stops_early=True)


class Best:
    """The weights with the lowest held-out error so far, and how many epochs ago that was."""

    def __init__(self) -> None:
        self.loss = math.inf
        self.weights: dict[str, Tensor] | None = None
        self.num_epochs = 0
        self._num_worse = 0

    def look(self, loss: float, weights: dict[str, Tensor]) -> None:
        """Takes note of an epoch; copies the weights when it is the best so far."""
        self.num_epochs += 1
        if loss < self.loss:
            self.loss, self._num_worse = loss, 0
            self.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        elif self.num_epochs > MIN_EPOCHS:
            self._num_worse += 1

    @property
    def is_past(self) -> bool:
        """True when more epochs are not expected to help."""
        return self._num_worse >= PATIENCE

    def state(self) -> dict[str, Any]:
        """All that `restore` needs."""
        return {
            "loss": self.loss,
            "weights": self.weights,
            "num_epochs": self.num_epochs,
            "num_worse": self._num_worse,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.loss, self.weights = state["loss"], state["weights"]
        self.num_epochs, self._num_worse = state["num_epochs"], state["num_worse"]
