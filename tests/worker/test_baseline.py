"""The linear baseline: what principal components of the training rows reach on rows they have not seen."""

import numpy as np
import pytest
import torch

from retraind.errors import Interrupted
from retraind.worker import baseline
from retraind.worker.batches import RowRange, split_rows

CPU = torch.device("cpu")


def write_rows(path, num_rows, num_metrics, num_causes):
    rng = np.random.default_rng(3)
    causes = rng.standard_normal((num_rows, num_causes)) @ rng.standard_normal((num_causes, num_metrics))
    rows = causes + 0.1 * rng.standard_normal((num_rows, num_metrics)) + 0.5  # no part of a file is centred by itself
    rows.astype("<f4").tofile(path)
    return RowRange(path, num_metrics, 0, num_rows)


@pytest.mark.parametrize(("num_rows", "num_metrics"), [(400, 12), (9000, 300)], ids=["one block", "three blocks"])
def test_the_loss_is_that_of_the_textbook(tmp_path, num_rows, num_metrics):
    training, heldout = split_rows(write_rows(tmp_path / "rows", num_rows, num_metrics, 4), 0.2)
    told = []
    loss = baseline.pca_loss(training, heldout, 3, CPU, told.append)
    x = np.fromfile(tmp_path / "rows", "<f4").reshape(num_rows, num_metrics).astype(np.float64)
    mean = x[: training.num_rows].mean(axis=0)
    axes = np.linalg.svd(x[: training.num_rows] - mean, full_matrices=False)[2][:3].T
    rest = (x[training.num_rows :] - mean) @ (np.eye(num_metrics) - axes @ axes.T)
    assert loss == pytest.approx((rest**2).mean(), rel=1e-6)
    assert len(told) >= 2


def test_with_no_more_metrics_than_components_nothing_is_left(tmp_path):
    training, heldout = split_rows(write_rows(tmp_path / "rows", 100, 3, 3), 0.2)
    assert baseline.pca_loss(training, heldout, 8, CPU, lambda _: None) == pytest.approx(0, abs=1e-12)


def test_wide_data_are_left_out(tmp_path):
    rows = write_rows(tmp_path / "rows", 4, baseline.MAX_METRICS + 1, 1)
    assert baseline.pca_loss(rows, rows, 8, CPU, lambda _: None) is None


def test_constant_metrics_and_two_rows_are_no_error(tmp_path):
    np.zeros((2, 5), "<f4").tofile(tmp_path / "rows")
    rows = RowRange(tmp_path / "rows", 5, 0, 2)
    assert baseline.pca_loss(rows, rows, 8, CPU, lambda _: None) == 0


def test_a_stop_is_heard_between_two_blocks(tmp_path):
    def stop(_):
        raise Interrupted("terminated", "asked to stop")

    rows = write_rows(tmp_path / "rows", 100, 3, 3)
    with pytest.raises(Interrupted):
        baseline.pca_loss(rows, rows, 8, CPU, stop)
