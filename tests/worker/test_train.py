"""The training loop on the CPU: same weights for the same seed, and every way in which it may fail."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from retraind.config import TrainingConfig
from retraind.errors import HostError, Interrupted, ResourceError, TrainingError
from retraind.worker import batches, model, step, train
from retraind.worker.rows import RowRange

CPU = torch.device("cpu")
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Recorder:
    """Hears everything, and asks for progress after every step."""

    def __init__(self, stop_after=math.inf):
        self.shares = []
        self.reports = []
        self.stop_after = stop_after

    def beat(self, done_share=None):
        self.shares.append(done_share)
        if len(self.shares) >= self.stop_after:
            raise Interrupted("terminated", "asked to stop")

    def is_progress_due(self):
        return True

    def progress(self, progress):
        self.reports.append(progress)


def write_rows(path, num_rows, num_metrics=6, scale=1.0):
    values = np.random.default_rng(7).standard_normal((num_rows, num_metrics)) * scale
    values.astype("<f4").tofile(path)
    return RowRange(path, num_metrics, 0, num_rows)


def run(rows, listener=None, **settings):
    settings = {"epochs": 5, **settings}  # the straightforward run, whose steps can be counted
    return train.train(rows, TrainingConfig(**settings), CPU, listener or Recorder())


def test_the_optimizer_is_torchs_adamw():
    ours, theirs = model.build(6, seed=1), model.build(6, seed=1)
    training = TrainingConfig(learning_rate=3e-3, weight_decay=0.05)
    optimizer = step.make_optimizer(ours, training)
    assert isinstance(optimizer, step.FusedAdamW)
    reference = torch.optim.AdamW(theirs.parameters(), lr=3e-3, weight_decay=0.05)
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        x = torch.randn(64, 6, generator=generator)
        for network, adamw in ((ours, optimizer), (theirs, reference)):
            adamw.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(network(x), x).backward()
            adamw.step()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # A bias before BatchNorm has no gradient but rounding noise, and Adam makes full steps of noise.
        if name not in {"encoder.0.bias", "decoder.0.bias"}:
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_a_torch_without_the_operator_trains_with_its_own_adamw(monkeypatch, tmp_path):
    rows = write_rows(tmp_path / "rows", 500)
    _, fused = run(rows, batch_size=100)
    monkeypatch.delattr(torch, "_fused_adamw_")
    assert type(step.make_optimizer(model.build(6, 0), TrainingConfig())) is torch.optim.AdamW
    _, plain = run(rows, batch_size=100)
    assert plain.epoch_losses == pytest.approx(fused.epoch_losses, abs=1e-5)


def test_gradients_are_dropped_or_set_to_zero():
    network = model.build(6, seed=1)
    optimizer = step.make_optimizer(network, TrainingConfig())
    network(torch.ones(2, 6)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in network.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("sizes", [{}, {"WINDOW_BYTES": 8192, "BLOCK_BYTES": 512}], ids=["resident", "streamed"])
def test_the_same_rows_and_seed_give_the_same_bytes(tmp_path, monkeypatch, sizes):
    rows = write_rows(tmp_path / "rows", 1000)
    if sizes:
        whole = batches.Batches.__init__.__kwdefaults__
        monkeypatch.setitem(whole, "window_bytes", sizes["WINDOW_BYTES"])
        monkeypatch.setitem(whole, "block_bytes", sizes["BLOCK_BYTES"])
    first = model.serialise(run(rows, batch_size=64, epochs=2)[0])
    torch.rand(3)
    assert model.serialise(run(rows, batch_size=64, epochs=2)[0]) == first
    assert model.serialise(run(rows, batch_size=64, epochs=2, seed=1)[0]) != first


@forks
def test_loader_processes_do_not_change_the_weights(tmp_path):
    rows = write_rows(tmp_path / "rows", 500)
    alone, _ = run(rows, batch_size=64, epochs=2)
    helped, _ = run(rows, batch_size=64, epochs=2, num_workers=2)
    assert model.serialise(helped) == model.serialise(alone)


@pytest.mark.parametrize(
    ("num_rows", "num_steps"), [(2, 3), (3, 3), (1000, 3), (2048, 3), (2049, 3), (2050, 6), (4097, 6)]
)
def test_any_number_of_rows_trains_on_all_of_them(tmp_path, num_rows, num_steps):
    recorder = Recorder()
    trained, report = run(write_rows(tmp_path / "rows", num_rows), recorder, epochs=3)
    assert report.num_steps == num_steps
    assert trained.encoder[1].num_batches_tracked == num_steps
    assert recorder.shares[-1] == 1.0
    assert len(report.epoch_losses) == 3
    assert all(math.isfinite(loss) for loss in report.epoch_losses)


def test_the_loss_falls_on_rows_that_can_be_learned(tmp_path):
    latent = np.random.default_rng(1).standard_normal((4000, 2))
    mixed = latent @ np.random.default_rng(2).standard_normal((2, 12))
    (mixed / mixed.std(axis=0)).astype("<f4").tofile(tmp_path / "rows")
    _, report = run(RowRange(tmp_path / "rows", 12, 0, 4000), batch_size=100, epochs=10)
    assert report.epoch_losses[0] > 0.3
    assert report.epoch_losses[-1] < 0.1


def test_the_reported_loss_is_the_mean_over_the_epochs_rows(tmp_path):
    rows = write_rows(tmp_path / "rows", 250)
    # With a learning rate this small the model stays as built, and batches can be recomputed one by one.
    _, report = run(rows, batch_size=100, epochs=1, learning_rate=1e-30)
    network = model.build(6, seed=0).train()
    total = 0.0
    for x in batches.Batches(rows, 100, seed=0, device=CPU).epoch(0):
        total += ((network(x) - x) ** 2).mean().item() * len(x)
    assert report.epoch_losses == [pytest.approx(total / 250, rel=1e-6)]


def test_progress_tells_epoch_loss_and_time_left(tmp_path):
    recorder = Recorder()
    _, report = run(write_rows(tmp_path / "rows", 300), recorder, batch_size=100, epochs=2)
    assert [progress.epoch for progress in recorder.reports] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert {progress.epochs for progress in recorder.reports} == {2}
    assert [recorder.reports[3].loss, recorder.reports[-1].loss] == report.epoch_losses
    assert recorder.reports[0].seconds_left > 0
    assert recorder.reports[-1].seconds_left == 0
    assert recorder.reports[0].device == "cpu"
    assert recorder.shares == sorted(recorder.shares)


def test_a_listener_stops_training_between_two_steps(tmp_path):
    recorder = Recorder(stop_after=2)
    with pytest.raises(Interrupted):
        run(write_rows(tmp_path / "rows", 1000), recorder, batch_size=100)
    assert len(recorder.shares) == 2


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_loss_that_is_not_finite_ends_training(tmp_path, precision):
    rows = write_rows(tmp_path / "rows", 100, scale=1e25)
    with pytest.raises(TrainingError) as caught:
        run(rows, precision=precision)
    assert caught.value.code == "non_finite_loss"


@pytest.mark.parametrize("batch_size", [2, 2048], ids=["many steps", "one step an epoch"])
def test_fp16_that_overflows_for_ever_ends_before_its_scale_is_zero(tmp_path, batch_size):
    rows = write_rows(tmp_path / "rows", 100, scale=1e6)
    recorder = Recorder()
    with pytest.raises(TrainingError) as caught:
        run(rows, recorder, precision="fp16", batch_size=batch_size)
    assert caught.value.code == "diverged"
    assert len(recorder.shares) <= step.MAX_CONSECUTIVE_SKIPS + 1


def test_fp16_recovers_from_a_scale_that_is_too_high(tmp_path):
    # Gradients of about 100 times 2**16 overflow; the scale is halved until they fit.
    trained, report = run(write_rows(tmp_path / "rows", 200, scale=100), precision="fp16", batch_size=10)
    assert 0 < report.num_skipped_steps < report.num_steps
    assert all(math.isfinite(loss) for loss in report.epoch_losses)
    train.require_finite(trained)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_learns_what_float32_learns(tmp_path, precision):
    rows = write_rows(tmp_path / "rows", 2000)
    _, exact = run(rows, batch_size=100)
    trained, report = run(rows, batch_size=100, precision=precision)
    assert report.precision == precision
    assert report.epoch_losses[-1] == pytest.approx(exact.epoch_losses[-1], rel=0.05)
    assert {tensor.dtype for tensor in trained.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("requested", "device", "capability", "chosen"),
    [
        ("auto", "cpu", (0, 0), "float32"),
        ("auto", "cuda", (6, 1), "float32"),
        ("auto", "cuda", (7, 0), "fp16"),
        ("auto", "cuda", (7, 5), "fp16"),
        ("auto", "cuda", (8, 0), "bf16"),
        ("auto", "cuda", (12, 0), "bf16"),
        ("float32", "cuda", (9, 0), "float32"),
        ("fp16", "cpu", (0, 0), "fp16"),
    ],
)
def test_auto_precision_follows_the_device(requested, device, capability, chosen):
    assert train.choose_precision(requested, device, capability) == chosen


def test_a_weight_that_is_not_finite_is_named():
    network = model.build(6, seed=0)
    network.decoder[1].running_var[2] = math.nan
    with pytest.raises(TrainingError, match=r"decoder\.1\.running_var") as caught:
        train.require_finite(network)
    assert caught.value.code == "diverged"


def allocate_too_much():
    torch.empty(2**55)


def answer_as_cuda_does():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def answer_as_python_does():
    raise MemoryError


@pytest.mark.parametrize("action", [allocate_too_much, answer_as_cuda_does, answer_as_python_does])
def test_memory_that_runs_out_is_a_resource_error(action):
    with pytest.raises(ResourceError) as caught, train.out_of_memory_as_resource_error(2048):
        action()
    assert caught.value.code == "out_of_memory"
    assert "2048" in caught.value.message


def test_other_errors_of_torch_stay_what_they_are():
    with pytest.raises(RuntimeError, match="mat1"), train.out_of_memory_as_resource_error(2048):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


def test_the_device_is_what_is_there():
    assert train.choose_device("cpu") == CPU
    if torch.cuda.is_available():
        assert train.choose_device("auto").type == train.choose_device("cuda").type == "cuda"
    else:
        assert train.choose_device("auto") == CPU
        with pytest.raises(HostError) as caught:
            train.choose_device("cuda")
        assert caught.value.code == "preflight_failed"


ONE_RUN = """
import sys
from pathlib import Path
import torch
from retraind.config import TrainingConfig
from retraind.worker import model, train
from retraind.worker.rows import RowRange
class Nobody:
    def beat(self, done_share=None): ...
    def is_progress_due(self): return False
    def progress(self, progress): ...
rows = RowRange(Path(sys.argv[1]), 6, 0, 500)
trained, _ = train.train(rows, TrainingConfig(), torch.device("cpu"), Nobody())
model.serialise(trained)
print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))))
"""


def test_training_never_imports_torchs_compiler(tmp_path):
    rows = write_rows(tmp_path / "rows", 500)
    command = [sys.executable, "-W", "error", "-c", ONE_RUN, str(rows.path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert output.strip() == "[]"
