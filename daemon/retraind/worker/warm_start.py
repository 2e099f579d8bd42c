"""The published network as the first weights of a training, in the units of the new data's scaler.

Owns which version may be gone on from, and how its weights are told in other units: the same function of raw values, as
far as centres and scales have moved little. What it can not use never fails a job: the weights are then drawn, and
`why_not` says why. Never trains, never decides whether the result is published. Raises nothing.
"""

# D metrics, F = window x metrics
# ruff: noqa: N803, N806  (arrays carry their shape)

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from retraind import report
from retraind.errors import HostError
from retraind.worker.compare import inputs
from retraind.worker.detector import read_version
from retraind.worker.model import HIDDEN_DIM, LATENT_DIM, TelemetryAutoencoder

# A metric whose centre has moved by more deviations than this, or whose deviation by a larger factor, is another one:
# its weights are taken as they are, since in the new units they would be too large to be learned away.
MAX_MOVE = 10.0


@dataclass(frozen=True)
class FirstWeights:
    """A network to go on from, and the version that it is of; or none, and why."""

    network: TelemetryAutoencoder | None = None
    version: str = ""
    why_not: str = ""


def first_weights(home: Path, dataset: report.Dataset, scaler: report.Scaler, window: int) -> FirstWeights:
    """Those of the live version below `home`, for rows of this dataset, scaled by this scaler."""
    if not (home / "current").is_symlink():
        return FirstWeights(why_not="nothing was published before")
    try:
        manifest, network, _ = read_version(home)
    except (HostError, OSError) as error:
        return FirstWeights(why_not=f"the published version can not be used: {error}")
    names = manifest.metric_names
    if inputs(manifest.dataset) != inputs(dataset):
        return FirstWeights(why_not=f"version {manifest.version} is of other metrics")
    shape = report.ModelShape(
        input_dim=len(names) * window, hidden_dim=HIDDEN_DIM, latent_dim=LATENT_DIM, window=window
    )
    if manifest.shape != shape:
        return FirstWeights(why_not=f"version {manifest.version} has a window of {manifest.shape.window} rows")
    order = [names.index(name) for name in dataset.metric_names]
    constant = {*manifest.dataset.constant_metrics, *dataset.constant_metrics}
    factor_D, shift_D = _move(manifest.scaler, scaler, order)
    is_kept_D = (factor_D.log().abs() <= torch.tensor(MAX_MOVE).log()) & (shift_D.abs() <= MAX_MOVE)
    is_kept_D &= torch.tensor([name not in constant for name in dataset.metric_names])
    factor_D = torch.where(is_kept_D, factor_D, 1.0)
    shift_D = torch.where(is_kept_D, shift_D, 0.0)
    _tell_in_other_units(network, order, factor_D, shift_D, window)
    if not all(tensor.isfinite().all() for tensor in network.state_dict().values()):
        return FirstWeights(why_not=f"version {manifest.version} holds numbers that are not finite")
    return FirstWeights(network, manifest.version)


def _move(published: report.Scaler, scaler: report.Scaler, order: list[int]) -> tuple[Tensor, Tensor]:
    """What makes a published network's input of a value that is scaled anew: factor x value + shift. Shapes (D,)."""
    centre_D, scale_D = (torch.tensor(values, dtype=torch.float64) for values in (scaler.centre, scaler.scale))
    old_centre_D, old_scale_D = (
        torch.tensor(values, dtype=torch.float64)[order] for values in (published.centre, published.scale)
    )
    return scale_D / old_scale_D, (centre_D - old_centre_D) / old_scale_D


@torch.no_grad()
def _tell_in_other_units(
    network: TelemetryAutoencoder, order: list[int], factor_D: Tensor, shift_D: Tensor, window: int
) -> None:
    """Changes the first and the last layer, and nothing of what the network does with raw values."""
    order_F = torch.cat([torch.tensor(order) + row * len(order) for row in range(window)])
    factor_F, shift_F = factor_D.repeat(window), shift_D.repeat(window)
    first, last = cast("nn.Linear", network.encoder[0]), cast("nn.Linear", network.decoder[3])
    weight_HF = first.weight.double()[:, order_F]
    first.bias.copy_(first.bias + weight_HF @ shift_F)
    first.weight.copy_(weight_HF * factor_F)
    last.weight.copy_(last.weight.double()[order_F] / factor_F.unsqueeze(1))
    last.bias.copy_((last.bias.double()[order_F] - shift_F) / factor_F)
