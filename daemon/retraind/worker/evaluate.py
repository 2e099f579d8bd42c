"""How good a model is and whether its file holds it: held-out error, threshold, and the weights read back.

Owns what the gate is told, and the rule for the threshold; what stands out among the held-out rows is seen.py's. Never
trains and never decides. Memory is bounded by a block of rows and 4 bytes for each held-out one, of which there are
MAX_HELDOUT_ROWS at most.
Raises TrainingError non_finite_loss and diverged, HostError host_io for weights that do not read back as written.
"""

# N rows, B rows of a block, D metrics, F = window x metrics
# ruff: noqa: N803, N806  (tensors carry their shape)

import copy
import hashlib
import io
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from retraind import report
from retraind.config import TrainingConfig
from retraind.errors import HostError, TrainingError
from retraind.worker.model import LATENT_DIM, TelemetryAutoencoder, build, tensor_facts
from retraind.worker.rows import MAX_HELDOUT_ROWS, RowRange, last_rows, present, read_blocks
from retraind.worker.scorer import Scorer
from retraind.worker.seen import Seen

# What rounding alone leaves of a row: a threshold of 0, of constant data, would call every row anomalous.
MIN_THRESHOLD = torch.finfo(torch.float32).eps ** 2

# Looked at after every epoch of training.
MAX_WATCHED_ROWS = 65_536

# Enough that every weight has a part in an answer, and done within a millisecond.
_NUM_COMPARED_ROWS = 256

# Told the share that is done after every block; may raise to stop between two.
Beat = Callable[[float | None], None]


class _Losses:
    """Sums of squares over values that are there: of the net's residual by metric, and of the values themselves."""

    def __init__(self, rows: RowRange, device: torch.device) -> None:
        self._num_metrics = rows.num_metrics
        self._sums_3D = torch.zeros(3, rows.num_metrics, dtype=torch.float64, device=device)
        self._pca_square = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, filled_BF: Tensor, residual_BF: Tensor, pca_residual_BF: Tensor, is_there_BF: Tensor | None) -> None:
        """A block of windows without a gap, and what the net and principal components leave of it."""
        if is_there_BF is None:
            self._sums_3D[2] += filled_BF.numel() // self._num_metrics
        else:
            filled_BF, residual_BF, pca_residual_BF = (
                part_BF.mul(is_there_BF) for part_BF in (filled_BF, residual_BF, pca_residual_BF)
            )
            self._sums_3D[2] += self._by_metric(is_there_BF)
        self._sums_3D[0] += self._by_metric(residual_BF.square())
        self._sums_3D[1] += self._by_metric(filled_BF.square())
        self._pca_square += pca_residual_BF.square().sum(dtype=torch.float64)

    def _by_metric(self, values_BF: Tensor) -> Tensor:
        return values_BF.reshape(-1, self._num_metrics).sum(dim=0, dtype=torch.float64)

    def means(self) -> tuple[float, float, float, list[float]]:
        """The net's loss, that of predicting the mean, that of principal components; the net's by metric."""
        number = self._sums_3D[2].sum().clamp(min=1)
        net, mean = (self._sums_3D[:2].sum(dim=1) / number).tolist()
        by_metric_D = self._sums_3D[0] / self._sums_3D[2].clamp(min=1)
        return net, mean, (self._pca_square / number).item(), by_metric_D.tolist()


@torch.no_grad()
def watched_loss(model: TelemetryAutoencoder, rows: RowRange, device: torch.device) -> float:
    """The mean squared error of the last MAX_WATCHED_ROWS of held-out rows; leaves the model in training mode.

    Told to nobody while it runs: it is done within a second. Raises TrainingError non_finite_loss.
    """
    model.eval()
    square, number = torch.zeros((), dtype=torch.float64, device=device), 0
    for block_BF in read_blocks(last_rows(rows, MAX_WATCHED_ROWS)):
        x_BF = block_BF.to(device)
        filled_BF = present(x_BF, has_missing=rows.has_missing)
        residual_BF = model(filled_BF) - filled_BF
        number += x_BF.numel()
        if rows.has_missing:
            residual_BF.mul_(~x_BF.isnan())
            number -= int(x_BF.isnan().sum())
        square += residual_BF.square_().sum(dtype=torch.float64)
    model.train()
    loss = square.item() / max(number, 1)
    if not math.isfinite(loss):
        raise TrainingError("non_finite_loss", f"the held-out loss became {loss}")
    return loss


def threshold_of(errors_N: Tensor, target_share: float) -> report.Threshold:
    """The error that a normal row exceeds with the probability `target_share`, as far as these rows can tell.

    Of N errors and a further one from the same source every rank is as likely, so the further one exceeds the k-th
    smallest with the probability (N + 1 - k) / (N + 1). That gives k; and below 1 / (N + 1) no share can be promised,
    which is the floor: with fewer than 1 / target_share rows the threshold is the largest error that was seen.
    """
    num_rows = len(errors_N)
    # The product of a share and a number is off by a rounding: 0.001 of 999 + 1 is one row, not one row and a bit.
    num_above = max(1, int((num_rows + 1) * target_share + 1e-9))
    value = errors_N.kthvalue(num_rows + 1 - num_above).values.item()
    return report.Threshold(
        value=max(value, MIN_THRESHOLD),
        target_share=target_share,
        expected_share=num_above / (num_rows + 1),
        num_rows=num_rows,
    )


def evaluate(
    scorer: Scorer,
    training_rows: RowRange,
    heldout_rows: RowRange | None,
    metric_names: list[str],
    beat: Beat,
    *,
    false_alarm_share: float = TrainingConfig().false_alarm_share,
) -> report.Evaluation:
    """What the held-out rows say; the last training rows where none are held out. Raises TrainingError non_finite_loss.

    Losses are of the net's own windows, errors and scores are the scorer's.
    """
    rows = heldout_rows or last_rows(training_rows, MAX_HELDOUT_ROWS)
    losses = _Losses(rows, scorer.device)
    seen = Seen(rows, metric_names)
    num_done = 0
    for block_BF in read_blocks(rows.seen_through(scorer.reach)):
        x_BF = block_BF.to(scorer.device)
        filled = scorer.filled(x_BF, has_missing=rows.has_missing)
        is_there_BF = ~x_BF.isnan() if rows.has_missing else None
        residuals, own_BF = scorer.residuals(filled), filled[0]
        is_own_there_BF = None if is_there_BF is None else is_there_BF[:, -rows.input_dim :]
        losses.add(own_BF, residuals[0], scorer.pca_residual(own_BF, LATENT_DIM), is_own_there_BF)
        seen.add(scorer.errors_of(residuals, is_there_BF), x_BF[:, -rows.num_metrics :])
        num_done += len(x_BF)
        beat(num_done / rows.num_rows)
    loss, mean_loss, pca_loss, metric_errors = losses.means()
    if not (math.isfinite(loss) and math.isfinite(mean_loss)):
        raise TrainingError("non_finite_loss", f"the held-out loss is {loss}, predicting the mean gives {mean_loss}")
    threshold = threshold_of(seen.errors(), false_alarm_share)
    return report.Evaluation(
        num_heldout_rows=heldout_rows.num_rows if heldout_rows else 0,
        heldout_loss=loss,
        mean_loss=mean_loss,
        pca_loss=pca_loss,
        threshold=threshold,
        metric_errors=metric_errors,
        histogram=seen.histogram(threshold.value),
        scores=seen.series(threshold.value),
        worst_rows=seen.worst_rows(threshold.value),
    )


def read_back(path: Path, sha256: str, input_dim: int) -> list[report.TensorFact]:
    """The tensors that a weights file really holds, after a strict load and a forward pass on the CPU.

    torch does not check the archive's checksums: the digest is compared first. Raises HostError host_io when the bytes
    are not the ones that were written, TrainingError diverged when the model answers with numbers that are not finite.
    """
    data = path.read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise HostError("host_io", f"{path} reads back as {found}, {sha256} was written", remedy="check the disk")
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    model = build(input_dim, seed=0)
    model.load_state_dict(state, strict=True)
    if not torch.isfinite(probe(model.eval(), input_dim)).all():
        raise TrainingError("diverged", "the model's answer to a row of means is not finite")
    return tensor_facts(state)


@torch.no_grad()
def require_same_answers(path: Path, trained: TelemetryAutoencoder, rows: RowRange) -> None:
    """Holds a model that is loaded from the file to the trained one: the same answers, bit for bit, on the last rows.

    Both run on the CPU, whatever the device was. Raises HostError host_io when they differ: the file is whole, and
    still not the model that was measured.
    """
    loaded = build(rows.input_dim, seed=0)
    loaded.load_state_dict(torch.load(path, map_location="cpu", weights_only=True), strict=True)
    measured = copy.deepcopy(trained).cpu()
    for block_BF in read_blocks(last_rows(rows, _NUM_COMPARED_ROWS)):
        x_BF = present(block_BF, has_missing=rows.has_missing)
        found_BF, expected_BF = (model.eval()(x_BF) for model in (loaded, measured))
        if not torch.allclose(found_BF, expected_BF, rtol=0, atol=0, equal_nan=True):
            remedy = "check memory and disk, and keep the file: it should not happen"
            raise HostError("host_io", f"{path} answers otherwise than the model that was trained", remedy=remedy)


@torch.no_grad()
def probe(model: TelemetryAutoencoder, input_dim: int) -> Tensor:
    """The answer to one row of means, which is all 0 in scaled units."""
    answer: Tensor = model(torch.zeros(1, input_dim))
    return answer
