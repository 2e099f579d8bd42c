"""Held-out error, and weights that are believed only after they were read back."""

import hashlib
import math

import numpy as np
import pytest
import torch

from retraind.errors import HostError, Interrupted, TrainingError
from retraind.worker import evaluate, model
from retraind.worker.rows import RowRange, split_rows
from retraind.worker.scorer import fit_scorer

CPU = torch.device("cpu")


class Counter:
    """Counts the blocks that it is told of."""

    def __init__(self, stop_after=math.inf):
        self.shares = []
        self.stop_after = stop_after

    def beat(self, done_share=None):
        self.shares.append(done_share)
        if len(self.shares) >= self.stop_after:
            raise Interrupted("terminated", "asked to stop")


def write_rows(path, num_rows, num_metrics=6, scale=1.0):
    values = np.random.default_rng(7).standard_normal((num_rows, num_metrics)) * scale
    values.astype("<f4").tofile(path)
    return RowRange(path, num_metrics, 0, num_rows)


def trained_model(num_metrics=6):
    network = model.build(num_metrics, seed=1).train()
    network(torch.randn(50, num_metrics, generator=torch.Generator().manual_seed(0)))  # moves BatchNorm's statistics
    return network


def evaluate_model(network, training, heldout, beat=lambda _: None, **settings):
    scorer = fit_scorer(network, training, CPU, lambda _: None)
    names = [f"m{i}" for i in range(training.num_metrics)]
    return evaluate.evaluate(scorer, training, heldout, names, beat, **settings)


def test_the_losses_are_means_over_the_held_out_rows_alone(tmp_path):
    network = trained_model()
    training, heldout = split_rows(write_rows(tmp_path / "rows", 1000), 0.2)
    found = evaluate_model(network, training, heldout)
    x = torch.from_numpy(np.fromfile(tmp_path / "rows", "<f4").reshape(1000, 6)[800:])
    with torch.no_grad():
        expected = ((network.eval()(x) - x).double() ** 2).mean().item()
    assert found.num_heldout_rows == 200
    assert found.heldout_loss == pytest.approx(expected, rel=1e-6)
    assert found.mean_loss == pytest.approx((x.double() ** 2).mean().item(), rel=1e-6)


def test_the_losses_do_not_depend_on_how_many_blocks_there_are(tmp_path):
    rows = write_rows(tmp_path / "rows", 3000, num_metrics=1024)  # three blocks
    network = trained_model(1024)
    counter = Counter()
    found = evaluate_model(network, rows, None, counter.beat)
    x = torch.from_numpy(np.fromfile(tmp_path / "rows", "<f4").reshape(3000, 1024))
    with torch.no_grad():
        squares = (network.eval()(x) - x).double() ** 2
    assert found.heldout_loss == pytest.approx(squares.mean().item(), rel=1e-6)
    assert found.metric_errors == pytest.approx(squares.mean(dim=0).tolist(), rel=1e-5)
    assert found.mean_loss == pytest.approx((x.double() ** 2).mean().item(), rel=1e-6)
    assert len(counter.shares) == 3
    assert counter.shares[-1] == 1.0


def test_without_held_out_rows_the_training_rows_are_judged_and_said_so(tmp_path):
    rows = write_rows(tmp_path / "rows", 2)
    found = evaluate_model(trained_model(), rows, None)
    assert found.num_heldout_rows == 0
    assert found.heldout_loss > 0


def test_evaluation_leaves_the_weights_as_they_are(tmp_path):
    network = trained_model()
    before = model.serialise(network)
    evaluate_model(network, write_rows(tmp_path / "rows", 100), None)
    assert model.serialise(network) == before


def test_a_stop_is_heard_between_two_blocks(tmp_path):
    rows = write_rows(tmp_path / "rows", 3000, num_metrics=1024)
    counter = Counter(stop_after=1)
    with pytest.raises(Interrupted):
        evaluate_model(trained_model(1024), rows, None, counter.beat)
    assert len(counter.shares) == 1


def test_a_held_out_loss_that_is_not_finite_is_an_error(tmp_path):
    rows = write_rows(tmp_path / "rows", 10)
    network = trained_model()
    network.decoder[3].bias.data[2] = math.inf
    with pytest.raises(TrainingError) as caught:
        evaluate_model(network, rows, None)
    assert caught.value.code == "non_finite_loss"


def write_weights(path, network):
    data = model.serialise(network)
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def test_weights_read_back_as_what_the_architecture_prescribes(tmp_path):
    sha256 = write_weights(tmp_path / "weights.pt", trained_model())
    assert evaluate.read_back(tmp_path / "weights.pt", sha256, 6) == model.expected_tensors(6)


def test_one_flipped_bit_on_disk_is_noticed(tmp_path):
    path = tmp_path / "weights.pt"
    sha256 = write_weights(path, trained_model())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(HostError) as caught:
        evaluate.read_back(path, sha256, 6)
    assert caught.value.code == "host_io"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_whose_answer_is_not_finite_is_refused(tmp_path, value):
    network = trained_model()
    network.encoder[1].running_mean[0] = value
    sha256 = write_weights(tmp_path / "weights.pt", network)
    with pytest.raises(TrainingError) as caught:
        evaluate.read_back(tmp_path / "weights.pt", sha256, 6)
    assert caught.value.code == "diverged"


def test_a_tensor_that_the_answer_does_not_show_is_still_reported(tmp_path):
    network = trained_model()
    network.encoder[1].running_var[0] = math.inf  # divides, so the answer stays finite
    sha256 = write_weights(tmp_path / "weights.pt", network)
    facts = evaluate.read_back(tmp_path / "weights.pt", sha256, 6)
    assert [fact.name for fact in facts if not fact.is_finite] == ["encoder.1.running_var"]


def test_a_file_that_answers_otherwise_than_the_trained_model_is_noticed(tmp_path):
    """Whole, finite and of the right shapes, and one weight is not the one that was measured."""
    rows = write_rows(tmp_path / "rows", 300)
    network = trained_model()
    write_weights(tmp_path / "weights.pt", network)
    before = model.serialise(network)
    evaluate.require_same_answers(tmp_path / "weights.pt", network, rows)
    assert model.serialise(network) == before
    network.decoder[3].weight.data[5, 23] += 1e-3
    with pytest.raises(HostError, match="answers otherwise") as caught:
        evaluate.require_same_answers(tmp_path / "weights.pt", network, rows)
    assert caught.value.code == "host_io"


@pytest.mark.parametrize(
    ("num_rows", "target", "num_above", "expected"),
    [
        (999, 0.001, 0, 0.001),  # 1 of 1000: the largest
        (1999, 0.001, 1, 0.001),
        (99, 0.001, 0, 0.01),  # too few to promise so little
        (1, 0.001, 0, 0.5),
        (99, 0.1, 9, 0.1),
        (262_144, 0.001, 261, 262 / 262_145),
    ],
)
def test_the_threshold_is_the_rank_that_the_target_asks_for(num_rows, target, num_above, expected):
    errors = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)) + 1.0
    found = evaluate.threshold_of(errors, target)
    assert (errors > found.value).sum() == num_above
    assert found.value in errors
    assert found.expected_share == pytest.approx(expected)
    assert (found.target_share, found.num_rows) == (target, num_rows)


def test_the_share_of_fresh_rows_above_the_threshold_is_the_expected_one():
    generator = torch.Generator().manual_seed(1)
    shares = []
    for _ in range(200):
        threshold = evaluate.threshold_of(torch.randn(499, generator=generator).exp(), 0.01)
        shares.append((torch.randn(20_000, generator=generator).exp() > threshold.value).double().mean().item())
    assert sum(shares) / len(shares) == pytest.approx(0.01, rel=0.1)


def test_data_without_any_error_have_a_threshold_all_the_same():
    assert 0 < evaluate.threshold_of(torch.zeros(100), 0.01).value < 1e-13


def test_the_threshold_is_of_the_held_out_rows_and_of_the_models_own_errors(tmp_path):
    network = trained_model()
    training, heldout = split_rows(write_rows(tmp_path / "rows", 1000), 0.2)
    found = evaluate_model(network, training, heldout, false_alarm_share=0.05)
    scorer = fit_scorer(network, training, CPU, lambda _: None)
    x = torch.from_numpy(np.fromfile(tmp_path / "rows", "<f4").reshape(1000, 6)[800:])
    errors = scorer.errors(x, has_missing=False).mean(dim=1)
    assert found.threshold.num_rows == 200
    assert (errors > found.threshold.value).sum() == 9  # (200 + 1) * 0.05, rounded down, less the one itself


def test_the_linear_baseline_is_that_of_the_textbook(tmp_path):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1000, 9)) @ rng.standard_normal((9, 20)) + 0.1 * rng.standard_normal((1000, 20)) + 0.5
    x.astype("<f4").tofile(tmp_path / "rows")
    training, heldout = split_rows(RowRange(tmp_path / "rows", 20, 0, 1000), 0.2)
    found = evaluate_model(trained_model(20), training, heldout)
    mean = x[:800].mean(axis=0)
    axes = np.linalg.svd(x[:800] - mean, full_matrices=False)[2][: model.LATENT_DIM].T
    rest = (x[800:] - mean) @ (np.eye(20) - axes @ axes.T)
    assert found.pca_loss == pytest.approx((rest**2).mean(), rel=1e-4)


def test_what_stands_out_is_told_with_its_row_and_metrics(tmp_path):
    x = np.random.default_rng(5).standard_normal((1000, 6))
    x[950, 4] = 12.0  # softened: 4 x (1 + ln(z / 4))
    x[950, 1] = -8.0
    x.astype("<f4").tofile(tmp_path / "rows")
    training, heldout = split_rows(RowRange(tmp_path / "rows", 6, 0, 1000), 0.2)
    found = evaluate_model(trained_model(), training, heldout)
    worst = found.worst_rows[0]
    assert (worst.row, [share.name for share in worst.metrics[:2]]) == (950, ["m4", "m1"])
    assert worst.metrics[0].z == pytest.approx(4 * np.exp(2), rel=1e-6)
    assert [one.score for one in found.worst_rows] == sorted((one.score for one in found.worst_rows), reverse=True)
    assert sum(found.histogram.counts) == 200
    assert len(found.histogram.edges) == len(found.histogram.counts) + 1
    assert (found.scores.first_row, found.scores.rows_per_point, len(found.scores.maxima)) == (800, 1, 200)
    assert max(found.scores.maxima) == pytest.approx(worst.score)


def test_missing_values_have_no_part_in_any_figure(tmp_path):
    """A metric that is there in every second row only counts with those rows."""
    x = np.random.default_rng(6).standard_normal((400, 6))
    x[::2, 3] = np.nan
    x.astype("<f4").tofile(tmp_path / "rows")
    rows = RowRange(tmp_path / "rows", 6, 0, 400, has_missing=True)
    network = trained_model()
    scorer = fit_scorer(network, rows, CPU, lambda _: None)
    found = evaluate.evaluate(scorer, rows, None, list("abcdef"), lambda _: None)
    filled = scorer.filled(torch.from_numpy(x).float(), has_missing=True)[0]
    there = torch.from_numpy(~np.isnan(x))
    assert filled.isfinite().all()
    assert torch.equal(filled[there], torch.from_numpy(x).float()[there])
    with torch.no_grad():
        squares = (network.eval()(filled) - filled).double() ** 2
        centred = torch.from_numpy(np.nan_to_num(x)).float()
        watched = (network(centred) - centred).double() ** 2
    assert found.heldout_loss == pytest.approx(squares[there].mean().item(), rel=1e-5)
    assert found.mean_loss == pytest.approx(np.nanmean(x**2), rel=1e-5)
    assert found.metric_errors[3] == pytest.approx(squares[1::2, 3].mean().item(), rel=1e-5)
    assert evaluate.watched_loss(network, rows, CPU) == pytest.approx(watched[there].mean().item(), rel=1e-5)
