"""Whether a candidate may be published: a pure verdict on the facts that the worker measured. No I/O, no torch.

The worker reads its own file back and reports what is in it; this module decides, and the process that decides is
the process that publishes.
"""

import math

from retraind.config import GateConfig
from retraind.report import Candidate, Criterion, TensorFact
from retraind.supervisor.siblings import unfit

# Ten thousand rows in all, as a tenth is held out. With fewer, a handful of epochs that somebody asked for leaves the
# net near its first weights, and who tries the service with a small file wants to see it publish.
MIN_COMPARED_ROWS = 1000


def judge(candidate: Candidate, config: GateConfig) -> list[Criterion]:
    """Everything that was looked at, in order. What did not pass is told once for each thing that is wrong."""
    return [
        *_tensors(candidate),
        *_widths(candidate),
        *_files(candidate),
        *_finite_weights(candidate),
        *_finite_scaler(candidate),
        *(_losses(candidate, config) if math.isfinite(candidate.evaluation.heldout_loss) else _no_loss(candidate)),
    ]


def objections(criteria: list[Criterion]) -> list[Criterion]:
    """What speaks against the candidate; when nothing does, it is accepted."""
    return [criterion for criterion in criteria if not criterion.passed]


def _one(message: str, *, code: str, passed: bool) -> list[Criterion]:
    return [Criterion(code=code, passed=passed, message=message)]


def _all(wrong: list[str], right: str, *, code: str) -> list[Criterion]:
    """One criterion for each thing that is wrong, or one that says that nothing is."""
    found = [Criterion(code=code, passed=False, message=message) for message in wrong]
    return found or _one(right, code=code, passed=True)


def _tensors(candidate: Candidate) -> list[Criterion]:
    found, expected = _facts(candidate.tensors), _facts(candidate.expected)
    wrong = [
        f"{name}: the file has {found.get(name, 'nothing')}, the model needs {expected.get(name, 'nothing')}"
        for name in sorted(expected.keys() | found.keys())
        if found.get(name) != expected.get(name)
    ]
    if not expected:
        wrong.append("the candidate names no tensors")
    return _all(wrong, f"the file has the {len(expected)} tensors that the model needs", code="wrong_tensors")


def _facts(tensors: list[TensorFact]) -> dict[str, tuple[list[int], str]]:
    return {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors}


def _widths(candidate: Candidate) -> list[Criterion]:
    num_metrics = len(candidate.dataset.metric_names)
    width, rest = divmod(candidate.shape.input_dim, candidate.shape.window)
    lengths = {num_metrics, width, len(candidate.scaler.centre), len(candidate.scaler.scale)}
    message = "metrics, input width, centres and scales must be equally many, not "
    if len(lengths) != 1 or rest:
        return _one(f"{message}{sorted(lengths)}", code="wrong_tensors", passed=False)
    return _one(f"model and scaler are as wide as the {num_metrics} metrics", code="wrong_tensors", passed=True)


def _files(candidate: Candidate) -> list[Criterion]:
    problem = unfit(candidate.siblings)
    message = problem or f"further files that belong to the model: {len(candidate.siblings)}"
    return _one(message, code="wrong_files", passed=not problem) if candidate.siblings else []


def _finite_weights(candidate: Candidate) -> list[Criterion]:
    wrong = [f"{tensor.name} holds NaN or infinity" for tensor in candidate.tensors if not tensor.is_finite]
    return _all(wrong, "every weight is finite", code="non_finite_weights")


def _finite_scaler(candidate: Candidate) -> list[Criterion]:
    scaler = candidate.scaler
    is_sound = all(map(math.isfinite, [*scaler.centre, *scaler.scale])) and all(scale > 0 for scale in scaler.scale)
    message = "the scaler is finite and positive" if is_sound else "the scaler is not finite and positive"
    return _one(message, code="non_finite_weights", passed=is_sound)


def _no_loss(candidate: Candidate) -> list[Criterion]:
    return _one(f"the held-out loss is {candidate.evaluation.heldout_loss}", code="non_finite_loss", passed=False)


def _losses(candidate: Candidate, config: GateConfig) -> list[Criterion]:
    """Comparisons of a held-out loss that is a number."""
    finite = _one(f"the held-out loss is {candidate.evaluation.heldout_loss:.6g}", code="non_finite_loss", passed=True)
    return [*finite, *_limit(candidate, config), *_mean(candidate, config), *_published(candidate, config)]


def _limit(candidate: Candidate, config: GateConfig) -> list[Criterion]:
    loss, limit = candidate.evaluation.heldout_loss, config.max_heldout_loss
    if limit is None:
        return []
    where = "above" if loss > limit else "not above"
    message = f"the held-out loss {loss:.6g} is {where} gate.max_heldout_loss {limit:.6g}"
    return _one(message, code="loss_above_limit", passed=loss <= limit)


def _mean(candidate: Candidate, config: GateConfig) -> list[Criterion]:
    """Compared where that can be done: with enough rows held out, in which something moved."""
    evaluation = candidate.evaluation
    loss, mean_loss, num_rows = evaluation.heldout_loss, evaluation.mean_loss, evaluation.num_heldout_rows
    if config.worse_than_mean == "publish":
        why_not = "gate.worse_than_mean is publish"
    elif num_rows < MIN_COMPARED_ROWS:
        why_not = f"{num_rows} rows are held out, {MIN_COMPARED_ROWS} are needed"
    else:
        why_not = "" if mean_loss > 0 else "nothing moves in the held-out rows"
    if why_not:
        message = f"the held-out loss is not compared with that of predicting each metric's mean: {why_not}"
    elif loss < mean_loss:
        message = f"the held-out loss {loss:.6g} is below {mean_loss:.6g}, which predicting each metric's mean reaches"
    else:
        message = (
            f"the held-out loss {loss:.6g} is not below {mean_loss:.6g}, which predicting each "
            "metric's mean reaches: train for longer or on more rows, or set gate.worse_than_mean: publish"
        )
    return _one(message, code="worse_than_mean", passed=bool(why_not) or loss < mean_loss)


def _published(candidate: Candidate, config: GateConfig) -> list[Criterion]:
    """Compared where both were measured, on enough rows. Seeds alone make a difference, hence the margin."""
    comparison = candidate.evaluation.comparison
    if comparison is None:
        why_not = candidate.evaluation.no_comparison
        message = f"no model that is live was measured beside it{': ' if why_not else ''}{why_not}"
        return _one(message, code="worse_than_published", passed=True)
    ours, theirs, num_rows = comparison.candidate_error, comparison.published_error, comparison.num_rows
    limit = theirs * (1 + config.margin)
    is_worse = not ours <= limit and math.isfinite(theirs)
    figures = (
        f"its error on {num_rows:,} held-out rows, {ours:.6g}, is {'' if is_worse else 'not '}above that of version "
        f"{comparison.version}, which is live, {theirs:.6g}, by more than gate.margin"
    )
    if not is_worse:
        return _one(figures, code="worse_than_published", passed=True)
    if config.policy == "publish_always":
        why_not = "gate.policy is publish_always"
    else:
        why_not = (
            "" if num_rows >= MIN_COMPARED_ROWS else f"of so few rows that is not sure, {MIN_COMPARED_ROWS} are needed"
        )
    if why_not:
        return _one(f"{figures}: {why_not}", code="worse_than_published", passed=True)
    message = f"{figures}: train on more rows or for longer, or set gate.policy: publish_always"
    return _one(message, code="worse_than_published", passed=False)
