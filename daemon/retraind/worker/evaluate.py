"""How good a model is and whether its file holds it: held-out error, threshold, and the weights read back.

Owns what the gate is told, and the rule for the threshold. Never trains and never decides. Memory is bounded by a block
of rows and 4 bytes for each held-out one, of which there are MAX_HELDOUT_ROWS at most.
Raises TrainingError non_finite_loss and diverged, HostError host_io for weights that do not read back as written.
"""

# N rows, B rows of a block, D metrics
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
from retraind.worker.baseline import pca_loss
from retraind.worker.batches import MAX_HELDOUT_ROWS, RowRange, last_rows, read_blocks
from retraind.worker.model import LATENT_DIM, TelemetryAutoencoder, build, tensor_facts

# What rounding alone leaves of a row: a threshold of 0, of constant data, would call every row anomalous.
MIN_THRESHOLD = torch.finfo(torch.float32).eps ** 2

# Enough that every weight has a part in an answer, and done within a millisecond.
_NUM_COMPARED_ROWS = 256

# Told the share that is done after every block; may raise to stop between two.
Beat = Callable[[float | None], None]


@torch.no_grad()
def mean_losses(
    model: TelemetryAutoencoder, rows: RowRange, device: torch.device, beat: Beat
) -> tuple[float, float, Tensor]:
    """Mean squared error of the reconstruction, of predicting each metric's mean (0 in scaled units), and each row's.

    In float32, summed in float64. Leaves the model in evaluation mode. The sums are read once, at the end.
    """
    model.eval()
    errors_N = torch.empty(rows.num_rows, device=device)
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    num_done = 0
    for block_BD in read_blocks(rows):
        x_BD = block_BD.to(device)
        y_BD = model(x_BD)
        squared_BD = (y_BD - x_BD).square()
        errors_N[num_done : num_done + len(x_BD)] = squared_BD.mean(dim=1)
        squares[0] += squared_BD.sum(dtype=torch.float64)
        squares[1] += x_BD.double().square().sum()
        num_done += len(x_BD)
        beat(num_done / rows.num_rows)
    loss, mean_loss = (squares / (rows.num_rows * rows.num_metrics)).tolist()
    return loss, mean_loss, errors_N.cpu()


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
    model: TelemetryAutoencoder,
    training_rows: RowRange,
    heldout_rows: RowRange | None,
    device: torch.device,
    beat: Beat,
    *,
    false_alarm_share: float = TrainingConfig().false_alarm_share,
) -> report.Evaluation:
    """Held-out error; of the last training rows where none are held out. Raises TrainingError non_finite_loss."""
    rows = heldout_rows or last_rows(training_rows, MAX_HELDOUT_ROWS)
    loss, mean_loss, errors_N = mean_losses(model, rows, device, beat)
    if not (math.isfinite(loss) and math.isfinite(mean_loss)):
        raise TrainingError("non_finite_loss", f"the held-out loss is {loss}, predicting the mean gives {mean_loss}")
    return report.Evaluation(
        num_heldout_rows=heldout_rows.num_rows if heldout_rows else 0,
        heldout_loss=loss,
        mean_loss=mean_loss,
        pca_loss=pca_loss(training_rows, rows, LATENT_DIM, device, beat),
        threshold=threshold_of(errors_N, false_alarm_share),
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
    loaded = build(rows.num_metrics, seed=0)
    loaded.load_state_dict(torch.load(path, map_location="cpu", weights_only=True), strict=True)
    measured = copy.deepcopy(trained).cpu()
    for x_BD in read_blocks(last_rows(rows, _NUM_COMPARED_ROWS)):
        found_BD, expected_BD = (model.eval()(x_BD) for model in (loaded, measured))
        if not torch.allclose(found_BD, expected_BD, rtol=0, atol=0, equal_nan=True):
            remedy = "check memory and disk, and keep the file: it should not happen"
            raise HostError("host_io", f"{path} answers otherwise than the model that was trained", remedy=remedy)


@torch.no_grad()
def probe(model: TelemetryAutoencoder, input_dim: int) -> Tensor:
    """The answer to one row of means, which is all 0 in scaled units."""
    answer: Tensor = model(torch.zeros(1, input_dim))
    return answer
