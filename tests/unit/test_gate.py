"""The verdict on a candidate: one fact is wrong at a time, and each is told."""

import math
from collections.abc import Callable

import msgspec
import pytest
from builders import make_candidate, make_dataset, make_tensors

from retraind.config import GateConfig
from retraind.report import Candidate, Comparison, Criterion, Evaluation, ModelShape, Scaler, SiblingFile, TensorFact
from retraind.supervisor.gate import judge, objections

NO_LIMIT = GateConfig()


def with_tensor(number: int, **changes: object) -> Candidate:
    """A candidate whose file holds one tensor that is not as it should be."""
    tensors = make_tensors()
    tensors[number] = msgspec.structs.replace(tensors[number], **changes)
    return make_candidate(tensors=tensors)


def against(candidate: Candidate, config: GateConfig) -> list[Criterion]:
    return objections(judge(candidate, config))


def with_loss(loss: float) -> Candidate:
    return make_candidate(evaluation=Evaluation(num_heldout_rows=1, heldout_loss=loss, mean_loss=1.0))


def test_a_good_candidate_has_nothing_against_it() -> None:
    assert against(make_candidate(), NO_LIMIT) == []


@pytest.mark.parametrize(
    ("candidate", "code", "words"),
    [
        (with_tensor(0, is_finite=False), "non_finite_weights", "encoder.0.weight"),
        (with_tensor(1, is_finite=False), "non_finite_weights", "encoder.1.running_var"),
        (with_tensor(0, shape=[24, 3]), "wrong_tensors", "encoder.0.weight"),
        (with_tensor(0, dtype="float16"), "wrong_tensors", "float16"),
        (make_candidate(tensors=make_tensors()[:1]), "wrong_tensors", "encoder.1.running_var: the file has nothing"),
        (make_candidate(expected=make_tensors()[:1]), "wrong_tensors", "the model needs nothing"),
        (make_candidate(tensors=[], expected=[]), "wrong_tensors", "names no tensors"),
        (make_candidate(dataset=make_dataset(metric_names=["cpu"])), "wrong_tensors", "[1, 2]"),
        (make_candidate(shape=ModelShape(input_dim=3, hidden_dim=24, latent_dim=8)), "wrong_tensors", "[2, 3]"),
        (make_candidate(scaler=Scaler(centre=[0.0], scale=[1.0, 1.0])), "wrong_tensors", "[1, 2]"),
        (make_candidate(scaler=Scaler(centre=[0.0, 0.0], scale=[1.0])), "wrong_tensors", "[1, 2]"),
        (make_candidate(scaler=Scaler(centre=[math.nan, 0.0], scale=[1.0, 1.0])), "non_finite_weights", "scaler"),
        (make_candidate(scaler=Scaler(centre=[0.0, 0.0], scale=[1.0, math.inf])), "non_finite_weights", "scaler"),
        (make_candidate(scaler=Scaler(centre=[0.0, 0.0], scale=[1.0, 0.0])), "non_finite_weights", "scaler"),
        (make_candidate(scaler=Scaler(centre=[0.0, 0.0], scale=[1.0, -1.0])), "non_finite_weights", "scaler"),
        (make_candidate(scaler=Scaler(centre=[0.0, 0.0], scale=[1.0, math.nan])), "non_finite_weights", "scaler"),
        (make_candidate(siblings=[SiblingFile(name="../x", sha256="", num_bytes=1)]), "wrong_files", "'../x'"),
        (with_loss(math.nan), "non_finite_loss", "nan"),
        (with_loss(math.inf), "non_finite_loss", "inf"),
    ],
)
def test_one_wrong_fact_rejects_the_candidate_and_is_named(candidate: Candidate, code: str, words: str) -> None:
    (reason,) = against(candidate, NO_LIMIT)
    assert reason.code == code
    assert words in reason.message


def test_a_tensor_too_many_is_wrong_too() -> None:
    """A compiled or wrapped model names its tensors otherwise: the guide's class could not load them."""
    tensors = [*make_tensors(), TensorFact(name="module.extra", shape=[1], dtype="float32", is_finite=True)]
    (reason,) = against(make_candidate(tensors=tensors), NO_LIMIT)
    assert reason.message.startswith("module.extra: the file has ([1], 'float32')")


@pytest.mark.parametrize(
    ("loss", "limit", "accepted"),
    [(0.5, 0.6, True), (0.5, 0.5, True), (0.5, 0.4, False), (0.0, 1e-9, True), (1e9, None, True)],
)
def test_the_limit_on_the_held_out_loss_is_the_operators(loss: float, limit: float | None, *, accepted: bool) -> None:
    reasons = against(with_loss(loss), GateConfig(max_heldout_loss=limit))
    assert [reason.code for reason in reasons] == ([] if accepted else ["loss_above_limit"])


def test_a_loss_that_is_no_number_is_not_compared_with_the_limit() -> None:
    (reason,) = against(with_loss(math.nan), GateConfig(max_heldout_loss=0.1))
    assert reason.code == "non_finite_loss"


@pytest.mark.parametrize(
    ("loss", "mean_loss", "num_rows", "accepted"),
    [
        (0.99, 1.0, 1000, True), (1.0, 1.0, 1000, False), (1.3, 1.0, 100_000, False),
        (1.3, 1.0, 999, True),  # too small a file for so little training
        (1.3, 1.0, 0, True),  # measured on the rows that it learned from
        (1e-6, 0.0, 1000, True),  # nothing moves: the mean can not be beaten
    ],
)  # fmt: skip
def test_a_model_that_is_no_better_than_the_mean_is_rejected(
    loss: float, mean_loss: float, num_rows: int, *, accepted: bool
) -> None:
    evaluation = Evaluation(num_heldout_rows=num_rows, heldout_loss=loss, mean_loss=mean_loss)
    reasons = against(make_candidate(evaluation=evaluation), NO_LIMIT)
    assert [reason.code for reason in reasons] == ([] if accepted else ["worse_than_mean"])
    assert against(make_candidate(evaluation=evaluation), GateConfig(worse_than_mean="publish")) == []


def test_everything_that_is_wrong_is_told_at_once() -> None:
    tensors = [msgspec.structs.replace(tensor, is_finite=False) for tensor in make_tensors()]
    evaluation = Evaluation(num_heldout_rows=1, heldout_loss=math.inf, mean_loss=1.0)
    codes = [reason.code for reason in against(make_candidate(tensors=tensors, evaluation=evaluation), NO_LIMIT)]
    assert codes == ["non_finite_weights", "non_finite_weights", "non_finite_loss"]


@pytest.mark.parametrize("change", [lambda tensors: tensors[::-1], lambda tensors: list(tensors)])
def test_the_order_of_tensors_does_not_matter(change: Callable[[list[TensorFact]], list[TensorFact]]) -> None:
    assert against(make_candidate(tensors=change(make_tensors())), NO_LIMIT) == []


def test_losses_that_json_can_not_hold_come_back_as_none_and_are_refused_on_reading() -> None:
    """A NaN crosses the border as null: the candidate does not decode, so it never reaches the gate as a number."""
    data = msgspec.json.encode(with_loss(math.nan))
    with pytest.raises(msgspec.ValidationError, match="heldout_loss"):
        msgspec.json.decode(data, type=Candidate)


def test_what_passed_is_told_with_its_figures_in_the_order_in_which_it_was_looked_at() -> None:
    evaluation = Evaluation(num_heldout_rows=1000, heldout_loss=0.25, mean_loss=1.0)
    siblings = [SiblingFile(name="window.json", sha256="ab" * 32, num_bytes=1)]
    criteria = judge(make_candidate(evaluation=evaluation, siblings=siblings), GateConfig(max_heldout_loss=0.5))
    assert all(criterion.passed for criterion in criteria)
    assert [criterion.code for criterion in criteria] == [
        "wrong_tensors", "wrong_tensors", "wrong_files", "non_finite_weights", "non_finite_weights", "non_finite_loss",
        "loss_above_limit", "worse_than_mean", "worse_than_published",
    ]  # fmt: skip
    messages = " / ".join(criterion.message for criterion in criteria)
    for words in (
        "the 2 tensors",
        "the 2 metrics",
        "that belong to the model: 1",
        "0.25 is not above",
        "0.25 is below 1, which",
    ):
        assert words in messages


@pytest.mark.parametrize(
    ("changes", "config", "why"),
    [
        ({"num_heldout_rows": 999}, NO_LIMIT, "999 rows are held out, 1000 are needed"),
        ({"mean_loss": 0.0}, NO_LIMIT, "nothing moves"),
        ({}, GateConfig(worse_than_mean="publish"), "gate.worse_than_mean is publish"),
    ],
)
def test_a_comparison_that_could_not_be_made_says_why(changes: dict[str, float], config: GateConfig, why: str) -> None:
    evaluation = Evaluation(**{"num_heldout_rows": 1000, "heldout_loss": 0.5, "mean_loss": 1.0, **changes})
    told = next(one for one in judge(make_candidate(evaluation=evaluation), config) if one.code == "worse_than_mean")
    assert told.passed
    assert "not compared" in told.message
    assert why in told.message


def beside_published(ours: float, theirs: float, num_rows: int = 1000) -> Candidate:
    comparison = Comparison(version="000001-a", published_error=theirs, candidate_error=ours, num_rows=num_rows)
    return make_candidate(
        evaluation=Evaluation(num_heldout_rows=num_rows, heldout_loss=0.5, mean_loss=1.0, comparison=comparison)
    )


@pytest.mark.parametrize(
    ("candidate", "config", "is_rejected"),
    [
        (beside_published(1.25, 1.0), NO_LIMIT, False),  # as large as the margin allows
        (beside_published(1.26, 1.0), NO_LIMIT, True),
        (beside_published(0.1, 1.0), NO_LIMIT, False),
        (beside_published(1.26, 1.0, num_rows=999), NO_LIMIT, False),
        (beside_published(1.26, 1.0), GateConfig(policy="publish_always"), False),
        (beside_published(1.06, 1.0), GateConfig(margin=0.05), True),
        (beside_published(1.0, 0.0), NO_LIMIT, True),
        (beside_published(0.0, 0.0), NO_LIMIT, False),
        (beside_published(math.nan, 1.0), NO_LIMIT, True),
        (beside_published(1.0, math.nan), NO_LIMIT, False),  # a model that answers nothing is no measure
        (beside_published(math.inf, math.inf), NO_LIMIT, False),
    ],
)
def test_what_is_worse_than_the_live_model_by_more_than_the_margin_is_rejected(
    candidate: Candidate, config: GateConfig, *, is_rejected: bool
) -> None:
    assert [one.code for one in against(candidate, config)] == ["worse_than_published"] * is_rejected
    told = next(one.message for one in judge(candidate, config) if one.code == "worse_than_published")
    assert "000001-a" in told


def test_why_nothing_was_compared_stands_among_the_criteria() -> None:
    evaluation = Evaluation(num_heldout_rows=1, heldout_loss=0.5, mean_loss=1.0, no_comparison="no rows are held out")
    told = judge(make_candidate(evaluation=evaluation), NO_LIMIT)[-1]
    assert told.passed
    assert told.message == "no model that is live was measured beside it: no rows are held out"
