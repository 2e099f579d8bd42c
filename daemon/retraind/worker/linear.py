"""Linear paths beside the net: principal components of windows of rows, and what they can not rebuild.

Owns the fit, from rows that are spread over the training part. On labelled machines a linear model over a window finds
some faults better than any net does, and others worse: a score is made of both (scorer.py). The first components are
also the baseline that a net has to be worth its trouble beside. Never decides and never writes. Memory is a block of
rows and three F x F matrices, or the sampled rows where F is large. Raises what its beat and the rows raise.
"""

# B rows of a block, F = window x metrics, K components
# ruff: noqa: N803, N806, N815  (tensors carry their shape)

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from retraind.worker.rows import FLOAT_BYTES, RowRange, carried, spread_rows

# Directions of variance and typical errors are known from so many rows, so the fit does not grow with the dataset.
MAX_FIT_ROWS = 131_072
# Up to here all components are computed at once, in a second at the limit; above it the first ones by power iteration.
MAX_EXACT_WIDTH = 1024
# What is held of a dataset with wider windows.
SAMPLE_BYTES = 64 * 2**20
_NUM_ITERATIONS = 4
# Without them a machine that had lost one of its metrics had 20 % more alarms; with 3 none, but they go on to converge.
_NUM_FILLS = 8
_SEED = 0

Beat = Callable[[float | None], None]


@dataclass(frozen=True)
class LinearPath:
    """Mean, shape (F,), and orthonormal directions of greatest variance, largest first, shape (F, K)."""

    mean_F: Tensor
    axes_FK: Tensor

    @property
    def input_dim(self) -> int:
        return len(self.mean_F)

    def residual(self, x_BF: Tensor, num_components: int | None = None) -> Tensor:
        """What the components do not rebuild of each window, of its shape and type. No value may be NaN."""
        axes_FK = self.axes_FK[:, :num_components]
        centred_BF = x_BF - self.mean_F
        return centred_BF.sub_((centred_BF @ axes_FK) @ axes_FK.T)

    def filled(self, x_BF: Tensor, is_missing_BF: Tensor) -> Tensor:
        """The windows with what the components expect from the other values where one is missing, from `x` as a guess.

        Each round takes what they rebuild: in the end what is missing has no residual and disturbs no other's. A metric
        that is away for good would otherwise be read as one that stands still, and raise alarms.
        """
        for _ in range(_NUM_FILLS):
            x_BF = torch.where(is_missing_BF, x_BF - self.residual(x_BF), x_BF)
        return x_BF

    def to(self, device: torch.device) -> "LinearPath":
        return LinearPath(self.mean_F.to(device), self.axes_FK.to(device))


@torch.no_grad()
def fit(rows: RowRange, num_components: int, beat: Beat) -> LinearPath:
    """The linear path of these rows' windows, on the CPU, in float32. A missing value counts as the one before it.

    Half as many components as a window has values at most: with all of them nothing would be left to see.
    """
    width = rows.input_dim
    num_components = max(1, min(num_components, width // 2))
    if width > MAX_EXACT_WIDTH:
        return _fit_by_iteration(rows, num_components, beat)
    num_rows = 0
    sum_F = torch.zeros(width, dtype=torch.float64)
    products_FF = torch.zeros(width, width, dtype=torch.float64)
    for block_BF in spread_rows(rows, MAX_FIT_ROWS):
        # Values are scaled and a block is small: float32 is exact enough within it, and twice as fast.
        x_BF = carried(block_BF, rows.num_metrics) if rows.has_missing else block_BF.contiguous()
        sum_F += x_BF.sum(dim=0, dtype=torch.float64)
        products_FF += (x_BF.T @ x_BF).double()
        num_rows += len(x_BF)
        beat(None)
    mean_F = sum_F / num_rows
    covariance_FF = products_FF / num_rows - torch.outer(mean_F, mean_F)
    axes_FF = torch.linalg.eigh(covariance_FF).eigenvectors.flip(1)  # it gives the smallest first
    return LinearPath(mean_F.float(), axes_FF[:, :num_components].float().contiguous())


def _fit_by_iteration(rows: RowRange, num_components: int, beat: Beat) -> LinearPath:
    """Of a sample, by torch's randomised method: Halko, Martinsson and Tropp, 2011."""
    limit = max(num_components + 1, SAMPLE_BYTES // (rows.input_dim * FLOAT_BYTES))
    blocks = []
    for block_BF in spread_rows(rows, limit):
        blocks.append(carried(block_BF, rows.num_metrics) if rows.has_missing else block_BF.clone())
        beat(None)
    x_NF = torch.cat(blocks)
    mean_F = x_NF.mean(dim=0)
    num_found = min(num_components, len(x_NF))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SEED)
        _, _, axes_FK = torch.svd_lowrank(x_NF.sub_(mean_F), num_found, niter=_NUM_ITERATIONS)
    return LinearPath(mean_F, axes_FK.contiguous())
