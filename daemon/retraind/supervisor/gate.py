"""Whether a candidate may be published: a pure verdict on the facts that the worker measured. No I/O, no torch.

The worker reads its own file back and reports what is in it; this module decides, and the process that decides is
the process that publishes.
"""

import math

from retraind.config import GateConfig
from retraind.job import Reason
from retraind.report import Candidate, Evaluation

# Ten thousand rows in all, as a tenth is held out. With fewer, the usual five epochs are under 25 steps: the net has
# hardly left its first weights, and somebody who tries the service with a small file wants to see it publish.
MIN_COMPARED_ROWS = 1000


def judge(candidate: Candidate, config: GateConfig) -> list[Reason]:
    """Every reason against the candidate; an empty list accepts it."""
    return [*_shape_reasons(candidate), *_finite_reasons(candidate), *_loss_reasons(candidate, config)]


def _shape_reasons(candidate: Candidate) -> list[Reason]:
    found = {tensor.name: (tensor.shape, tensor.dtype) for tensor in candidate.tensors}
    expected = {tensor.name: (tensor.shape, tensor.dtype) for tensor in candidate.expected}
    reasons = []
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            message = (
                f"{name}: the file has {found.get(name, 'nothing')}, the model needs {expected.get(name, 'nothing')}"
            )
            reasons.append(Reason(code="wrong_tensors", message=message))
    if not expected:
        reasons.append(Reason(code="wrong_tensors", message="the candidate names no tensors"))
    num_metrics = len(candidate.dataset.metric_names)
    lengths = {num_metrics, candidate.shape.input_dim, len(candidate.scaler.centre), len(candidate.scaler.scale)}
    if len(lengths) != 1:
        message = f"metrics, input width, centres and scales must be equally many, not {sorted(lengths)}"
        reasons.append(Reason(code="wrong_tensors", message=message))
    return reasons


def _finite_reasons(candidate: Candidate) -> list[Reason]:
    reasons = [
        Reason(code="non_finite_weights", message=f"{tensor.name} holds NaN or infinity")
        for tensor in candidate.tensors
        if not tensor.is_finite
    ]
    scaler = candidate.scaler
    if not all(map(math.isfinite, [*scaler.centre, *scaler.scale])) or not all(scale > 0 for scale in scaler.scale):
        reasons.append(Reason(code="non_finite_weights", message="the scaler is not finite and positive"))
    return reasons


def _loss_reasons(candidate: Candidate, config: GateConfig) -> list[Reason]:
    loss = candidate.evaluation.heldout_loss
    if not math.isfinite(loss):
        return [Reason(code="non_finite_loss", message=f"the held-out loss is {loss}")]
    reasons = []
    if config.max_heldout_loss is not None and loss > config.max_heldout_loss:
        message = f"the held-out loss {loss:.6g} is above gate.max_heldout_loss {config.max_heldout_loss:.6g}"
        reasons.append(Reason(code="loss_above_limit", message=message))
    if config.worse_than_mean == "reject" and _is_worse_than_mean(candidate.evaluation):
        message = (
            f"the held-out loss {loss:.6g} is not below {candidate.evaluation.mean_loss:.6g}, which predicting each "
            "metric's mean reaches: train for longer or on more rows, or set gate.worse_than_mean: publish"
        )
        reasons.append(Reason(code="worse_than_mean", message=message))
    return reasons


def _is_worse_than_mean(evaluation: Evaluation) -> bool:
    """Where that can be known: with enough rows held out, in which something moved."""
    is_known = evaluation.num_heldout_rows >= MIN_COMPARED_ROWS and evaluation.mean_loss > 0
    return is_known and evaluation.heldout_loss >= evaluation.mean_loss
