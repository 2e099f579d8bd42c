"""What principal components reach on the held-out rows: the linear model that a net has to be worth its trouble beside.

Owns the fit, from the covariance of the training rows, and its error on the held-out ones. Never decides and never
writes. Memory is a block of rows and three D x D matrices of float64. Raises what its beat and the rows raise.
"""

# B rows of a block, D metrics, K components
# ruff: noqa: N806  (tensors carry their shape)

from collections.abc import Callable

import torch
from torch import Tensor

from retraind.worker.batches import RowRange, read_blocks

# A row costs 2 D^2 operations here and some 600 D in an epoch of training: with the usual five epochs this is a third
# of the training's work at the limit, and without one it would be most of a job with thousands of metrics.
MAX_METRICS = 512


@torch.no_grad()
def pca_loss(
    training_rows: RowRange,
    heldout_rows: RowRange,
    num_components: int,
    device: torch.device,
    beat: Callable[[float | None], None],
) -> float | None:
    """Mean squared error of rebuilding held-out rows from their first principal components, in float64.

    None above MAX_METRICS. 0 where there are no more metrics than components.
    """
    if training_rows.num_metrics > MAX_METRICS:
        return None
    mean_D, axes_DK = _fit(training_rows, num_components, device, beat)
    square = torch.zeros((), dtype=torch.float64, device=device)
    for block_BD in read_blocks(heldout_rows):
        x_BD = block_BD.to(device).double() - mean_D
        square += (x_BD - (x_BD @ axes_DK) @ axes_DK.T).square().sum()
        beat(None)
    return square.item() / (heldout_rows.num_rows * heldout_rows.num_metrics)


def _fit(
    rows: RowRange, num_components: int, device: torch.device, beat: Callable[[float | None], None]
) -> tuple[Tensor, Tensor]:
    """The mean and the directions of greatest variance. Rows are scaled, so that plain sums keep their digits."""
    sum_D = torch.zeros(rows.num_metrics, dtype=torch.float64, device=device)
    products_DD = torch.zeros(rows.num_metrics, rows.num_metrics, dtype=torch.float64, device=device)
    for block_BD in read_blocks(rows):
        x_BD = block_BD.to(device).double()
        sum_D += x_BD.sum(dim=0)
        products_DD += x_BD.T @ x_BD
        beat(None)
    mean_D = sum_D / rows.num_rows
    covariance_DD = products_DD / rows.num_rows - torch.outer(mean_D, mean_D)
    axes_DD = torch.linalg.eigh(covariance_DD.cpu()).eigenvectors  # ascending
    return mean_D, axes_DD[:, -num_components:].to(device)
