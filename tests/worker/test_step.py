"""The hand-written step against autograd: every gradient, for every width and batch; the same learning from both."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retraind.config import TrainingConfig
from retraind.worker import model, step

_ROOT = Path(__file__).resolve().parents[2]
TRAINING = TrainingConfig(learning_rate=1e-2, weight_decay=0.05)


def rows(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Correlated columns of different spread, as scaled metrics are."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_rows, width, generator=generator) @ torch.randn(width, width, generator=generator)
    return mixed / mixed.std().clamp_min(1e-6)


@pytest.mark.parametrize("num_rows", [2, 3, 64, 2048])
@pytest.mark.parametrize("width", [1, 2, 7, 19, 32, 38, 320])
def test_every_gradient_is_autograds(width: int, num_rows: int) -> None:
    network = model.build(width, seed=3).train()
    reference = copy.deepcopy(network)
    x_BD = rows(num_rows, width)
    untouched = x_BD.clone()
    hand_written = step.HandWrittenStep(network, TRAINING)
    loss = hand_written.gradients_of(x_BD)
    expected = torch.nn.functional.mse_loss(reference(x_BD), x_BD)
    expected.backward()
    assert torch.equal(x_BD, untouched), "the batch is the caller's"
    assert torch.isclose(loss, expected, rtol=1e-5)
    for (name, parameter), gradient in zip(reference.named_parameters(), hand_written._gradients, strict=True):
        # Where BatchNorm takes a bias away again the true gradient is 0, and both hold rounding noise.
        size = max(float(parameter.grad.abs().max()), 1e-3)
        assert torch.allclose(gradient / size, parameter.grad / size, atol=2e-4), name
    for name, buffer in reference.named_buffers():
        if "running" in name:
            assert torch.allclose(dict(network.named_buffers())[name], buffer, atol=1e-6), name


@pytest.mark.parametrize("num_rows", [2, 64])
def test_two_hundred_steps_of_either_form_reach_the_same_loss(num_rows: int) -> None:
    networks = [model.build(12, seed=5).train() for _ in range(2)]
    forms = (step.HandWrittenStep(networks[0], TRAINING), step.AutogradStep(networks[1], TRAINING, "float32"))
    losses = [[float(form(rows(num_rows, 12, seed))) for seed in range(200)] for form in forms]
    for form in forms:
        form.finish()
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert losses[0][-1] < losses[0][0]
    x_ND = rows(500, 12, seed=999)
    with torch.no_grad():
        first, second = (torch.nn.functional.mse_loss(network.eval()(x_ND), x_ND) for network in networks)
    assert float(first) == pytest.approx(float(second), rel=5e-3)
    assert [int(network.encoder[1].num_batches_tracked) for network in networks] == [200, 200]


def test_the_model_holds_what_was_learned_only_in_tensors_of_its_own() -> None:
    network = model.build(6, seed=1).train()
    before = copy.deepcopy(network.state_dict())
    form = step.HandWrittenStep(network, TRAINING)
    form(rows(64, 6))
    form.finish()
    after = network.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in after if name.endswith("weight"))
    storages = {tensor.untyped_storage().data_ptr() for tensor in after.values()}
    assert len(storages) == len(after), "a view of one vector would be saved with all of it"


def test_the_hand_written_form_is_taken_where_it_was_measured_and_autograd_elsewhere(monkeypatch) -> None:
    network = model.build(4, seed=0)
    assert isinstance(step.make_step(network, TRAINING, "float32"), step.HandWrittenStep)
    assert isinstance(step.make_step(network, TRAINING, "bf16"), step.AutogradStep)
    assert isinstance(step.make_step(network, TRAINING, "fp16"), step.AutogradStep)
    monkeypatch.delattr(torch, "_fused_adamw_")
    assert isinstance(step.make_step(network, TRAINING, "float32"), step.AutogradStep)


def test_a_step_of_its_own_process_gives_the_same_bits() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests/worker')\n"
        "import torch, hashlib; torch.set_num_threads(1)\n"
        "from test_step import TRAINING, rows; from retraind.worker import model, step\n"
        "network = model.build(9, 0).train(); form = step.HandWrittenStep(network, TRAINING)\n"
        "[form(rows(100 + seed % 2, 9, seed)) for seed in range(30)]; form.finish()\n"
        "print(hashlib.sha256(model.serialise(network)).hexdigest())\n"
    )
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=str(_ROOT)).stdout
        for _ in range(2)
    }
    assert len(runs) == 1
