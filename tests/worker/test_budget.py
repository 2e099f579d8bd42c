"""How long training goes on: enough steps on small files, the guide's run when it is asked for, the best state kept."""

import math

import numpy as np
import pytest
import torch

from retraind.config import TrainingConfig
from retraind.worker import train
from retraind.worker.budget import ENOUGH_STEPS, MIN_EPOCHS, PATIENCE, Best, Budget, budget_for
from retraind.worker.evaluate import watched_loss
from retraind.worker.rows import RowRange

CPU = torch.device("cpu")


class Silent:
    def beat(self, done_share=None):
        pass

    def is_progress_due(self):
        return False

    def progress(self, progress):
        pass


def test_a_number_of_epochs_is_taken_as_it_stands_with_the_batch_as_it_stands():
    assert budget_for(300, TrainingConfig(epochs=5)) == Budget(2048, 5, stops_early=False)


@pytest.mark.parametrize(
    ("num_rows", "batch_size"), [(2, 32), (1000, 32), (2560, 64), (21_321, 512), (81_920, 2048), (10_000_000, 2048)]
)
def test_a_small_file_gets_small_batches_and_as_many_steps(num_rows, batch_size):
    budget = budget_for(num_rows, TrainingConfig())
    assert budget.batch_size == batch_size
    num_steps = budget.num_epochs * max(1, num_rows // batch_size)
    assert num_steps >= ENOUGH_STEPS
    assert budget.num_epochs >= MIN_EPOCHS
    assert num_rows < 1_000_000 or budget.num_epochs == MIN_EPOCHS


def test_the_configured_batch_is_the_largest_one():
    assert budget_for(10_000_000, TrainingConfig(batch_size=256)).batch_size == 256


def test_the_best_epoch_is_kept_and_patience_begins_after_the_first_epochs():
    best, weights = Best(), {"w": torch.zeros(1)}
    losses = [3.0, 1.0, 2.0, 2.0, 2.0]
    for number, loss in enumerate(losses):
        weights["w"].fill_(number)
        best.look(loss, weights)
    assert (best.loss, best.weights["w"].item(), best.is_past) == (1.0, 1.0, False)
    for number in range(PATIENCE):
        assert not best.is_past
        best.look(1.5, weights)
        assert best.num_epochs == len(losses) + number + 1
    assert best.is_past
    again = Best()
    again.restore(best.state())
    assert (again.loss, again.is_past, again.weights) == (best.loss, True, best.weights)


def rows_to_learn_by_heart(path):
    """Noise: what is learned of the first rows is wrong for the last, so their error falls a little and then rises."""
    np.random.default_rng(11).standard_normal((120, 40)).astype("<f4").tofile(path)
    whole = RowRange(path, 40, 0, 120)
    return whole.part(0, 80), whole.part(80, 40)


def test_training_stops_when_held_out_rows_say_so_and_returns_the_best_weights(tmp_path):
    training, heldout = rows_to_learn_by_heart(tmp_path / "rows")
    model, report = train.train(training, TrainingConfig(), CPU, Silent(), None, heldout)
    assert len(report.heldout_losses) == report.epochs
    assert MIN_EPOCHS < report.epochs < budget_for(80, TrainingConfig()).num_epochs
    assert watched_loss(model, heldout, CPU) == pytest.approx(min(report.heldout_losses), rel=1e-6)
    assert min(report.heldout_losses) < report.heldout_losses[-1]


def test_the_guides_run_returns_its_last_weights(tmp_path):
    training, heldout = rows_to_learn_by_heart(tmp_path / "rows")
    settings = TrainingConfig(epochs=60, batch_size=32)
    model, report = train.train(training, settings, CPU, Silent(), None, heldout)
    assert report.epochs == 60
    assert watched_loss(model, heldout, CPU) == pytest.approx(report.heldout_losses[-1], rel=1e-6)
    assert math.isfinite(report.heldout_losses[-1])
