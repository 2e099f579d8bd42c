"""Training that begins with the published weights: the same function in other units, and never a reason to fail."""

import hashlib
import shutil

import numpy as np
import pytest
import torch
from scoring_data import METRICS, clean_rows, publish, write_csv
from test_checkpoint import Keeping, Listener, identity, outcome
from test_train import CPU, write_rows

from retraind import report, typed_json
from retraind.cli import main
from retraind.config import TrainingConfig
from retraind.report import Manifest
from retraind.worker import checkpoint, model, train
from retraind.worker.detector import read_version
from retraind.worker.warm_start import FirstWeights, first_weights

ROWS = clean_rows(12_000, seed=1)
WINDOW = 5


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    directory = tmp_path_factory.mktemp("published")
    rows = ROWS.copy()
    rows[:, 3] = 17.0  # a metric that never moves
    return publish(directory, rows, epochs=20, settings="training: {warm_start: true}\n").parents[1]


def facts(rows, names=METRICS):
    """What ingestion finds of rows, as far as first weights need it."""
    scale = rows.std(axis=0)
    constant = [name for name, deviation in zip(names, scale, strict=True) if deviation == 0]
    dataset = report.Dataset(
        name="", sha256="", num_bytes=0, format="", num_rows=len(rows), num_dropped={}, metric_names=list(names),
        ignored_columns=[], constant_metrics=constant,
    )  # fmt: skip
    scaler = report.Scaler(centre=rows.mean(axis=0).tolist(), scale=np.where(scale > 0, scale, 1.0).tolist())
    return dataset, scaler


def rebuilt(network, windows, scaler):
    """Windows of raw values, (B, W, D), through a network and back to raw values."""
    centre, scale = np.asarray(scaler.centre), np.asarray(scaler.scale)
    x_BF = torch.from_numpy(((windows - centre) / scale).reshape(len(windows), -1)).float()
    with torch.no_grad():
        y_BF = network.eval()(x_BF)
    return y_BF.double().numpy().reshape(windows.shape) * scale + centre


def test_the_network_does_with_raw_values_what_it_did_whatever_the_units_and_the_order(published):
    rows = ROWS.mean(axis=0) + np.linspace(0.3, 3.0, 8) * (ROWS - ROWS.mean(axis=0)) + 0.5 * ROWS.std(axis=0)
    rows[:, 3] = 17.0
    order = np.random.default_rng(3).permutation(8)
    names = [METRICS[place] for place in order]
    home = published / "published" / "telemetry_autoencoder"
    dataset, scaler = facts(rows[:, order], names)
    first = first_weights(home, dataset, scaler, WINDOW)
    manifest, network, _ = read_version(home)
    assert (first.version, first.why_not) == (manifest.version, "")
    windows = np.stack([rows[start : start + WINDOW] for start in range(0, 2000, 10)])
    expected = rebuilt(network, windows, manifest.scaler)
    found = rebuilt(first.network, windows[:, :, order], scaler)
    deviation = ROWS.std(axis=0)
    np.testing.assert_allclose(found / deviation[order], expected[:, :, order] / deviation[order], atol=2e-3)
    other = rebuilt(network, windows[:, :, order], scaler)
    assert np.abs(other / deviation[order] - expected[:, :, order] / deviation[order]).max() > 0.1


def test_a_metric_that_has_become_another_one_keeps_weights_that_can_be_learned_away(published):
    """It begins to move, moves a million times as much, or lies a million deviations away."""
    rows = ROWS.copy()
    rows[:, 3] *= 1e6
    rows[:, 5] *= 1e6
    rows[:, 6] += 1e6 * rows[:, 6].std()
    home = published / "published" / "telemetry_autoencoder"
    first = first_weights(home, *facts(rows), WINDOW)
    largest = {name: tensor.abs().max() for name, tensor in read_version(home)[1].named_parameters()}
    for name, tensor in first.network.named_parameters():
        assert tensor.abs().max() < 3 * largest[name] + 1, name


def learned(directory, rows=ROWS, *, epochs=1, names=METRICS, settings=()):
    """Trains by the command on rows as they would come next: its exit status, and the newest version there is."""
    file = write_csv(directory / "next.csv", rows, names)
    config = directory / "retraind.yaml"
    status = main(["train", str(file), "--epochs", str(epochs), "--config", str(config), *settings])
    versions = sorted((directory / "published" / "telemetry_autoencoder" / "versions").glob("0*/manifest.json"))
    return status, typed_json.decode(versions[-1].read_bytes(), Manifest)


@pytest.fixture
def copy(published, tmp_path):
    shutil.copytree(published, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def test_one_epoch_from_the_published_weights_is_nearly_as_good_as_many_and_the_gate_lets_it_pass(copy, capsys):
    status, warm = learned(copy)
    assert status == 0
    assert warm.sequence == 2
    assert warm.training.warm_start.startswith("000001-")
    assert warm.evaluation.comparison.candidate_error < 1.25 * warm.evaluation.comparison.published_error
    assert main(["models", "show", warm.version, "--config", str(copy / "retraind.yaml")]) == 0
    assert f"those of version {warm.training.warm_start}" in capsys.readouterr().out
    config = copy / "retraind.yaml"
    config.write_text(config.read_text().replace("warm_start: true", "warm_start: false"))
    status, _ = learned(copy)
    assert status == 1, "one epoch from drawn weights is worse than what is live"


@pytest.mark.parametrize("case", ["none", "other metrics", "other window", "damaged", "foreign"])
def test_weights_are_drawn_where_the_published_ones_can_not_be_used_and_that_is_said(case, copy):
    home = copy / "published" / "telemetry_autoencoder"
    version = (home / "current").resolve()
    rows, names, expected = ROWS, METRICS, "the published version can not be used: "
    if case == "none":
        shutil.rmtree(home)
        expected = "nothing was published before"
    elif case == "other metrics":
        with (copy / "retraind.yaml").open("a") as file:
            file.write("data: {metrics: own}\n")
        rows, names, expected = ROWS[:, :7], METRICS[:7], f"version {version.name} is of other metrics"
    elif case == "other window":
        config = copy / "retraind.yaml"
        config.write_text(config.read_text().replace("{warm_start: true}", "{warm_start: true, window: 3}"))
        expected = f"version {version.name} has a window of 5 rows"
    else:
        for path in (version, *version.iterdir()):
            path.chmod(0o755)
        weights, manifest = version / "weights.pt", version / "manifest.json"
        weights.write_bytes(b"not a model")
        if case == "foreign":
            digest = hashlib.sha256(b"not a model").hexdigest()
            known = typed_json.decode(manifest.read_bytes(), Manifest).weights_sha256
            manifest.write_text(manifest.read_text().replace(known, digest))
    status, cold = learned(copy, rows, epochs=10, names=names)
    assert status == 0
    assert cold.training.warm_start == ""
    assert cold.training.no_warm_start.startswith(expected)


def test_a_checkpoint_goes_on_from_what_was_live_when_training_began(tmp_path):
    """Whatever is live by then: bit for bit as one that was not broken off, and with the version it began with."""
    rows = write_rows(tmp_path / "rows", 150)
    settings = TrainingConfig(epochs=3, batch_size=64, warm_start=True)
    old, new = (lambda: FirstWeights(model.build(6, 11), "old")), (lambda: FirstWeights(model.build(6, 12), "new"))
    expected = outcome(*train.train(rows, settings, CPU, Listener(), first=old()))
    assert outcome(*train.train(rows, settings, CPU, Listener(), first=new())) != expected
    keeping = Keeping(tmp_path / "checkpoint", identity(settings))
    train.train(rows, settings, CPU, Listener(), keeping, first=old())
    (tmp_path / "kept").write_bytes(keeping.kept[2])
    kept = checkpoint.Checkpoints(tmp_path / "kept", identity(settings), every_seconds=1e9)
    trained, told = train.train(rows, settings, CPU, Listener(), kept, first=new())
    assert told.num_resumes == 1
    assert told.warm_start == "old"
    assert outcome(trained, told) == expected
