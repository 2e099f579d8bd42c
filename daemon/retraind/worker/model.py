"""The telemetry autoencoder: D metrics - 24 - 8 - 24 - D, with BatchNorm and LeakyReLU.

Its input is a window: D metrics of one row, or of several rows one after the other. Owns the architecture and the names
of its weights (encoder.0/1/3, decoder.0/1/3), which consumers load with a class of their own, and the bytes that a
model is written as. Never reads data, never trains. Raises nothing of its own.
"""

# B batch, D metrics, H latent
# ruff: noqa: N803, N806  (tensors carry their shape)

import copy
import io
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from retraind import report

HIDDEN_DIM = 24
LATENT_DIM = 8
# The published architecture's, not a tuning choice: a consumer's class has it fixed.
NEGATIVE_SLOPE = 0.2


class TelemetryAutoencoder(nn.Module):
    """Squeezes a row of metrics through LATENT_DIM numbers and rebuilds it."""

    def __init__(self, input_dim: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(input_dim, HIDDEN_DIM),
            nn.BatchNorm1d(HIDDEN_DIM),
            nn.LeakyReLU(NEGATIVE_SLOPE),
            nn.Linear(HIDDEN_DIM, LATENT_DIM),
            nn.LeakyReLU(NEGATIVE_SLOPE),
        )
        self.decoder = nn.Sequential(
            nn.Linear(LATENT_DIM, HIDDEN_DIM),
            nn.BatchNorm1d(HIDDEN_DIM),
            nn.LeakyReLU(NEGATIVE_SLOPE),
            nn.Linear(HIDDEN_DIM, input_dim),
        )

    def forward(self, x_BD: Tensor) -> Tensor:
        """The reconstruction, of the same shape. Training mode needs two rows at least: BatchNorm takes variances."""
        z_BH = self.encoder(x_BD)
        return cast("Tensor", self.decoder(z_BH))


def build(input_dim: int, seed: int) -> TelemetryAutoencoder:
    """A fresh model on the CPU whose weights depend on `input_dim` and `seed` alone.

    torch draws initial weights from a global generator: it is borrowed and given back as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return TelemetryAutoencoder(input_dim)


def folded(model: TelemetryAutoencoder) -> nn.Sequential:
    """The same function in evaluation mode with half the passes over memory: BatchNorm is folded into its layer.

    The weights are copies; the activations overwrite what they are given.
    """
    layers: list[nn.Module] = []
    for half in (model.encoder, model.decoder):
        for layer in copy.deepcopy(half).eval():
            if isinstance(layer, nn.BatchNorm1d):
                layers[-1] = fuse_linear_bn_eval(cast("nn.Linear", layers[-1]), layer)
            elif isinstance(layer, nn.LeakyReLU):
                layers.append(nn.LeakyReLU(layer.negative_slope, inplace=True))
            else:
                layers.append(layer)
    return nn.Sequential(*layers).eval()


def shape_of(input_dim: int, window: int) -> report.ModelShape:
    """The architecture as the manifest states it."""
    return report.ModelShape(input_dim=input_dim, hidden_dim=HIDDEN_DIM, latent_dim=LATENT_DIM, window=window)


def tensor_facts(state: dict[str, Tensor]) -> list[report.TensorFact]:
    """Name, shape, dtype and finiteness of every tensor, BatchNorm's buffers included."""
    return [
        report.TensorFact(
            name=name,
            shape=list(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            is_finite=bool(torch.isfinite(tensor).all()),
        )
        for name, tensor in state.items()
    ]


def expected_tensors(input_dim: int) -> list[report.TensorFact]:
    """What the state_dict of a sound model holds, in its order."""
    return tensor_facts(build(input_dim, seed=0).state_dict())


def serialise(model: nn.Module) -> bytes:
    """The model's state_dict as torch.save writes it, with all tensors on the CPU.

    Written to memory because the archive torch.save makes of a path holds the path's name: equal weights would give
    different files.
    """
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
