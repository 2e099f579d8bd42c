"""The error of a row: what net and linear paths leave, in units of what is usual, missing values left out."""

import numpy as np
import pytest
import torch

from retraind.errors import HostError, Interrupted
from retraind.worker import linear, model, scorer
from retraind.worker.rows import RowRange, carried, read_blocks
from retraind.worker.scorer import MIN_USUAL, MIN_USUAL_OF_CONSTANT, NEWEST_ROW_WEIGHT, POWER, fit_scorer, reach

CPU = torch.device("cpu")
D = 6


def quiet(_):
    pass


def write_rows(path, num_rows=2000, window=3, **facts):
    rng = np.random.default_rng(3)
    causes = rng.standard_normal((num_rows, 3)) @ rng.standard_normal((3, D))
    rows = (causes + 0.1 * rng.standard_normal((num_rows, D)) + 0.5).astype("<f4")
    rows[:, 5] = 0.0
    rows.tofile(path)
    return RowRange(path, D, 0, num_rows, window=window, **facts)


def network(window, seed=1):
    found = model.build(D * window, seed=seed).train()
    found(torch.randn(50, D * window, generator=torch.Generator().manual_seed(0)))  # moves BatchNorm's statistics
    return found.eval()


def windows(rows, length):
    return torch.cat([block.clone() for block in read_blocks(rows.seen_through(length))])


@pytest.mark.parametrize("window", [1, 3])
def test_the_error_is_the_mean_of_usual_residuals_to_the_power(tmp_path, window):
    """Against the definition in numpy and float64."""
    rows = write_rows(tmp_path / "rows", window=window)
    net = network(window)
    found = fit_scorer(net, rows, CPU, quiet)
    x = windows(rows, found.reach)
    expected = np.zeros((len(x), D))
    for number, length, components in [(0, window, None), (1, window, 16), (2, 2 * window, 24)][
        : 3 if window > 1 else 2
    ]:
        tail = x[:, -length * D :].double().numpy()
        if components is None:
            with torch.no_grad():
                rest = net(x[:, -length * D :]).double().numpy() - tail
        else:
            mean = tail.mean(axis=0)
            axes = np.linalg.svd(tail - mean, full_matrices=False)[2][: min(components, length * D // 2)].T
            rest = (tail - mean) @ (np.eye(length * D) - axes @ axes.T)
        amount = np.abs(rest.reshape(len(x), length, D))
        floor = np.array([MIN_USUAL] * 5 + [MIN_USUAL_OF_CONSTANT])
        usual = np.maximum(np.sqrt((amount**2).mean(axis=(0, 1))), floor)
        assert found.paths[number].usual_D.numpy() == pytest.approx(usual, rel=1e-3)
        parts = (amount / usual) ** POWER
        expected += parts.mean(axis=1) + NEWEST_ROW_WEIGHT * parts[:, -1]
    assert found.errors(x, has_missing=False).numpy() == pytest.approx(expected, rel=5e-3, abs=1e-4)


def test_without_a_window_a_score_looks_at_one_row_and_else_at_twice_the_window():
    assert [reach(window) for window in (1, 2, 5)] == [1, 4, 10]


def test_a_missing_value_is_left_out_and_the_others_count_as_without_it(tmp_path):
    rows = write_rows(tmp_path / "rows")
    found = fit_scorer(network(3), rows, CPU, quiet)
    x = windows(rows, found.reach)[:100]
    clean = found.errors(x, has_missing=False)
    assert found.errors(x, has_missing=True).numpy() == pytest.approx(clean.numpy(), rel=1e-5)
    holed = x.clone()
    holed[:, 2::D] = torch.nan  # metric 2, all along
    errors = found.errors(holed, has_missing=True)
    assert (errors[:, 2] == 0).all()
    assert (errors[:, [0, 1, 3, 4]] > 0).all()
    gone = x.clone()
    gone[7, -D:] = torch.nan
    errors = found.errors(gone, has_missing=True)
    assert errors[7].isnan().all()
    assert not errors[[6, 8]].isnan().any()


def test_a_missing_value_does_not_make_the_other_metrics_of_its_row_strange(tmp_path):
    """Of metrics that follow from others: alone, in a stretch longer than a window, and for good."""
    rows = write_rows(tmp_path / "rows")
    found = fit_scorer(network(3), rows, CPU, quiet)
    clean = windows(rows, found.reach)[100:200]
    expected = found.errors(clean, has_missing=False)[:, [0, 1, 3, 4]].mean(dim=1)
    for missing in (slice(-D + 2, -D + 3), slice(2, None, D)):  # metric 2: of the newest row, of each
        holed = clean.clone()
        holed[:, missing] = torch.nan
        errors = found.errors(holed, has_missing=True)[:, [0, 1, 3, 4]].mean(dim=1)
        assert (errors / expected).median().item() == pytest.approx(1.0, abs=0.1)


def test_what_is_missing_is_taken_from_before_in_its_window_else_from_after_else_the_centre():
    nan = np.nan
    window = torch.tensor([[nan, 1.0, nan], [2.0, nan, nan], [nan, nan, nan], [5.0, 4.0, nan]])
    expected = [[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [5.0, 4.0, 0.0]]
    assert carried(window.view(1, 12), 3).view(4, 3).tolist() == expected


def test_a_metric_that_was_always_missing_is_no_error(tmp_path):
    rows = write_rows(tmp_path / "rows", has_missing=True)
    data = np.fromfile(rows.path, "<f4").reshape(-1, D)
    data[:, 1] = np.nan
    data.tofile(rows.path)
    found = fit_scorer(network(3), rows, CPU, quiet)
    assert found.errors(windows(rows, found.reach), has_missing=True).isfinite().all()


def test_what_is_written_reads_back_as_the_same_scorer_and_equal_scorers_are_equal_bytes(tmp_path):
    rows = write_rows(tmp_path / "rows")
    net = network(3)
    found = fit_scorer(net, rows, CPU, quiet)
    data = scorer.serialise(found)
    assert data == scorer.serialise(fit_scorer(net, rows, CPU, quiet))
    loaded = scorer.load(data, net, 3, CPU, "scorer.pt")
    x = windows(rows, found.reach)
    assert torch.equal(loaded.errors(x, has_missing=False), found.errors(x, has_missing=False))


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04"])
def test_a_file_that_is_no_scorer_is_named(data):
    with pytest.raises(HostError, match=r"scorer\.pt can not be used") as caught:
        scorer.load(data, network(1), 1, CPU, "scorer.pt")
    assert caught.value.code == "host_io"


def test_fitting_leaves_the_network_and_torchs_generator_as_they_are(tmp_path):
    rows = write_rows(tmp_path / "rows")
    net = network(3)
    before, state = model.serialise(net), torch.random.get_rng_state()
    fit_scorer(net, rows, CPU, quiet)
    assert model.serialise(net) == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_wide_windows_are_fitted_from_a_sample_with_the_same_result(tmp_path, monkeypatch):
    rows = write_rows(tmp_path / "rows", window=1)
    exact = linear.fit(rows, 3, quiet)
    monkeypatch.setattr(linear, "MAX_EXACT_WIDTH", 4)
    sampled = linear.fit(rows, 3, quiet)
    assert torch.equal(sampled.axes_FK, linear.fit(rows, 3, quiet).axes_FK)
    alike = (exact.axes_FK.T @ sampled.axes_FK).abs().diagonal()
    assert alike.tolist() == pytest.approx([1, 1, 1], abs=1e-2)
    assert sampled.mean_F.numpy() == pytest.approx(exact.mean_F.numpy(), abs=1e-5)


@pytest.mark.parametrize("num_rows", [2, 3])
def test_two_rows_and_constant_metrics_are_no_error(tmp_path, num_rows, monkeypatch):
    np.zeros((num_rows, D), "<f4").tofile(tmp_path / "rows")
    rows = RowRange(tmp_path / "rows", D, 0, num_rows, window=3)
    for limit in (linear.MAX_EXACT_WIDTH, 4):
        monkeypatch.setattr(linear, "MAX_EXACT_WIDTH", limit)
        found = fit_scorer(network(3), rows, CPU, quiet)
        assert found.errors(windows(rows, found.reach), has_missing=False).isfinite().all()


def test_a_stop_is_heard_between_two_blocks(tmp_path):
    def stop(_):
        raise Interrupted("terminated", "asked to stop")

    with pytest.raises(Interrupted):
        fit_scorer(network(3), write_rows(tmp_path / "rows"), CPU, stop)
