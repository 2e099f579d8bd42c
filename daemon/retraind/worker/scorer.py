"""How strange a row is: what the net and the linear paths can not rebuild of the window that ends with it.

Owns the error of a row, its parts by metric, and the file that holds what a score needs beside the weights. Each path's
residual is counted in units of what is usual for that metric and path, to the power of POWER: squares alone let one
metric outvote all others, plain sums drown it. Both, the paths and the power, were chosen by what finds labelled faults
on three public sets (docs/ARCHITECTURE.md, "Scoring"). A missing value has no part in an error. Never decides what is
anomalous, never scales. Raises HostError host_io for a file that does not hold what it should.
"""

# B rows of a block, D metrics, W rows of a window, F = window x metrics
# ruff: noqa: N803, N806, N815  (tensors carry their shape)

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from retraind.errors import HostError
from retraind.worker.linear import MAX_FIT_ROWS, LinearPath, fit
from retraind.worker.model import TelemetryAutoencoder, folded
from retraind.worker.rows import RowRange, carried, spread_rows

SCORER_NAME = "scorer.pt"

POWER = 1.5
# How much the newest row counts beside the mean over its window: without it a spike of one metric in one row drowns
# among the rows before it. More finds such spikes better and long faults worse.
NEWEST_ROW_WEIGHT = 0.5
# Components of the path over the net's own window, and of the one over LONG_WINDOWS of it: what lasts for longer than
# a window shows there first.
NUM_COMPONENTS, NUM_LONG_COMPONENTS = 16, 24
LONG_WINDOWS = 2
# What counts as usual at least, in deviations: a metric that is rebuilt almost exactly is not to scream at its noise,
# and one that never changed has no deviation to be counted in.
MIN_USUAL, MIN_USUAL_OF_CONSTANT = 0.01, 0.1

Beat = Callable[[float | None], None]


def reach(window: int) -> int:
    """How many consecutive rows a score looks at. One, without a window: no path then knows what was before."""
    return window * LONG_WINDOWS if window > 1 else 1


@dataclass(frozen=True)
class Path:
    """What is usual for the residual of one path, by metric, shape (D,); `linear` is None for the net's own."""

    usual_D: Tensor
    linear: LinearPath | None = None


class Scorer:
    """A net and its linear paths. Works where `device` says; what it is given may lie anywhere."""

    def __init__(self, network: TelemetryAutoencoder, window: int, paths: list[Path], device: torch.device) -> None:
        self.window = window
        self.reach = reach(window)
        self.device = device
        self._network = folded(network).to(device)
        self.paths = [Path(path.usual_D.to(device), path.linear and path.linear.to(device)) for path in paths]
        own_width = window * len(paths[0].usual_D)
        self._widths = [own_width if path.linear is None else path.linear.input_dim for path in paths]

    def pca_residual(self, x_BF: Tensor, num_components: int) -> Tensor:
        """What as many principal components leave of the same windows: the baseline. Shapes (B, F)."""
        linear = self.paths[1].linear
        assert linear is not None, "the first path after the net's own is over its window"
        return linear.residual(x_BF, num_components)

    @torch.no_grad()
    def filled(self, x_BF: Tensor, *, has_missing: bool) -> list[Tensor]:
        """For each path the end of windows, as long as it looks back; for what is missing, what is expected there.

        That is of the linear path over the same window, also for the net.
        """
        if not has_missing:
            return [x_BF[:, -width:] for width in self._widths]
        carried_BF, is_missing_BF = carried(x_BF, len(self.paths[0].usual_D)), x_BF.isnan()
        filled = [
            path.linear.filled(carried_BF[:, -path.linear.input_dim :], is_missing_BF[:, -path.linear.input_dim :])
            for path in self.paths
            if path.linear is not None
        ]
        return [filled[0], *filled]

    @torch.no_grad()
    def residuals(self, filled: list[Tensor]) -> list[Tensor]:
        """What each path can not rebuild of what `filled` gave."""
        return [self._residual(path, filled_BF) for path, filled_BF in zip(self.paths, filled, strict=True)]

    @torch.no_grad()
    def newest_residual(self, x_BF: Tensor, *, has_missing: bool) -> Tensor:
        """What the net can not rebuild of the newest row of windows of `reach` rows, shape (B, D), of either sign."""
        own_BF = self.filled(x_BF.to(self.device), has_missing=has_missing)[0]
        return self._residual(self.paths[0], own_BF)[:, -len(self.paths[0].usual_D) :]

    def _residual(self, path: Path, filled_BF: Tensor) -> Tensor:
        if path.linear is not None:
            return path.linear.residual(filled_BF)
        rebuilt_BF: Tensor = self._network(filled_BF)
        return rebuilt_BF - filled_BF

    def errors(self, x_BF: Tensor, *, has_missing: bool) -> Tensor:
        """The error of each metric in each row, shape (B, D), from windows of `reach` rows that are softened.

        A row's mean over it is its error; 0 for a metric that is missing throughout the window. NaN throughout for a
        row in which nothing is there.
        """
        x_BF = x_BF.to(self.device)
        is_there_BF = ~x_BF.isnan() if has_missing else None
        return self.errors_of(self.residuals(self.filled(x_BF, has_missing=has_missing)), is_there_BF)

    @torch.no_grad()
    def errors_of(self, residuals: list[Tensor], is_there_BF: Tensor | None) -> Tensor:
        """The errors from what `residuals` gave, which is overwritten; None where nothing is missing."""
        num_rows, num_metrics = len(residuals[0]), len(self.paths[0].usual_D)
        is_there_BWD = None if is_there_BF is None else is_there_BF.view(num_rows, -1, num_metrics)
        errors_BD = torch.zeros(num_rows, num_metrics, device=self.device)
        for path, residual_BF in zip(self.paths, residuals, strict=True):
            amount_BWD = residual_BF.view(num_rows, -1, num_metrics).abs_().div_(path.usual_D)
            amount_BWD.mul_(amount_BWD.sqrt())  # POWER, at a tenth of the cost of a power
            if is_there_BWD is None:
                errors_BD += amount_BWD.mean(dim=1).add_(amount_BWD[:, -1], alpha=NEWEST_ROW_WEIGHT)
            else:
                is_there_tail_BWD = is_there_BWD[:, -amount_BWD.shape[1] :]
                errors_BD += _mean_of_present(amount_BWD, is_there_tail_BWD)
                newest_BD = _mean_of_present(amount_BWD[:, -1:], is_there_tail_BWD[:, -1:])
                errors_BD.add_(newest_BD, alpha=NEWEST_ROW_WEIGHT)
        if is_there_BWD is not None:
            errors_BD[~is_there_BWD[:, -1].any(dim=1)] = torch.nan
        return errors_BD


def _mean_of_present(amount_BWD: Tensor, is_there_BWD: Tensor) -> Tensor:
    """Shape (B, D), such that a row's mean is the mean over all values of its window that are there."""
    num_metrics = amount_BWD.shape[2]
    num_there_B = is_there_BWD.sum(dim=(1, 2)).clamp_(min=1)
    return amount_BWD.mul(is_there_BWD).sum(dim=1) * (num_metrics / num_there_B).unsqueeze(1)


@torch.no_grad()
def fit_scorer(network: TelemetryAutoencoder, rows: RowRange, device: torch.device, beat: Beat) -> Scorer:
    """A trained net with the linear paths of its training rows, whose windows are those of the net."""
    linears = [fit(rows, NUM_COMPONENTS, beat)]
    if rows.window > 1:
        linears.append(fit(rows.seen_through(reach(rows.window)), NUM_LONG_COMPONENTS, beat))
    unit_D = torch.ones(rows.num_metrics)
    plain = Scorer(network, rows.window, [Path(unit_D), *(Path(unit_D, linear) for linear in linears)], device)
    usual = _usual_residuals(plain, rows.seen_through(plain.reach), beat)
    paths = [Path(usual_D, linear) for usual_D, linear in zip(usual, [None, *linears], strict=True)]
    return Scorer(network, rows.window, paths, device)


def _usual_residuals(scorer: Scorer, rows: RowRange, beat: Beat) -> list[Tensor]:
    """The root mean square of each path's residual of each metric, on training rows, with its floor."""
    squares_PD = torch.zeros(len(scorer.paths), rows.num_metrics, dtype=torch.float64)
    counts_PD = torch.zeros_like(squares_PD)
    is_constant_D = torch.ones(rows.num_metrics, dtype=torch.bool)
    for block_BF in spread_rows(rows, MAX_FIT_ROWS):
        x_BF = block_BF.to(scorer.device)
        is_there_BF = ~x_BF.isnan()
        newest_BD = x_BF[:, -rows.num_metrics :]
        is_constant_D &= ((newest_BD == 0) | newest_BD.isnan()).all(dim=0).cpu()
        filled = scorer.filled(x_BF, has_missing=rows.has_missing)
        for index, residual_BF in enumerate(scorer.residuals(filled)):
            is_there_tail_BF = is_there_BF[:, -residual_BF.shape[1] :]
            squares_PD[index] += _by_metric(residual_BF.mul_(is_there_tail_BF).square_(), rows.num_metrics)
            counts_PD[index] += _by_metric(is_there_tail_BF, rows.num_metrics)
        beat(None)
    usual_PD = (squares_PD / counts_PD.clamp(min=1)).sqrt().float()
    floor_D = torch.where(is_constant_D, MIN_USUAL_OF_CONSTANT, MIN_USUAL)
    return list(torch.maximum(usual_PD, floor_D))


def _by_metric(values_BF: Tensor, num_metrics: int) -> Tensor:
    return values_BF.reshape(-1, num_metrics).sum(dim=0, dtype=torch.float64).cpu()


def serialise(scorer: Scorer) -> bytes:
    """What a score needs beside the weights, as tensors by name. Equal scorers give equal bytes."""
    state = {}
    for index, path in enumerate(scorer.paths):
        state[f"{index}.usual"] = path.usual_D.cpu()
        if path.linear is not None:
            state[f"{index}.mean"], state[f"{index}.axes"] = path.linear.mean_F.cpu(), path.linear.axes_FK.cpu()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load(data: bytes, network: TelemetryAutoencoder, window: int, device: torch.device, name: str) -> Scorer:
    """The scorer that `serialise` wrote; `name` is for the error. The caller has compared the digest."""
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        paths = [Path(state["0.usual"])]
        while f"{len(paths)}.usual" in state:
            index = len(paths)
            paths.append(Path(state[f"{index}.usual"], LinearPath(state[f"{index}.mean"], state[f"{index}.axes"])))
        return Scorer(network, window, paths, device)
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError, AttributeError, TypeError) as error:
        raise HostError("host_io", f"{name} can not be used: {error}", remedy="publish again") from error
