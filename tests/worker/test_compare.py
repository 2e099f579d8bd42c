"""The live model beside a candidate: on the same rows, in the same units, and never the reason that a job fails."""

import shutil

import numpy as np
import pytest
from scoring_data import METRICS, clean_rows, publish, write_csv
from test_checkpoint import Listener

from retraind import load_model, typed_json
from retraind.cli import main
from retraind.config import DataConfig, TrainingConfig
from retraind.job import Order
from retraind.report import Manifest
from retraind.worker import compare
from retraind.worker import main as worker
from retraind.worker.ingest import ingest

ROWS = clean_rows(12_000, seed=1)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory with a well trained model, and the settings that made it."""
    directory = tmp_path_factory.mktemp("published")
    publish(directory, ROWS, epochs=20)
    return directory


@pytest.fixture
def copy(published, tmp_path):
    """The same, for a test to add to."""
    shutil.copytree(published, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def train(directory, rows=ROWS, *, epochs=20, names=METRICS):
    """Trains on the rows as they would come next; the exit status and the manifest that is live then."""
    file = write_csv(directory / "next.csv", rows, names)
    config = str(directory / "retraind.yaml")
    status = main(["train", str(file), "--epochs", str(epochs), "--batch-size", "512", "--config", config])
    home = directory / "published" / "telemetry_autoencoder"
    return status, typed_json.decode((home / "current" / "manifest.json").read_bytes(), Manifest)


def test_the_same_data_again_gives_the_same_error_in_whatever_order_its_columns_are(copy):
    first = train(copy, ROWS + 0.0)[1]
    assert first.sequence == 2
    comparison = first.evaluation.comparison
    assert comparison.num_rows == 1200
    assert comparison.version.startswith("000001-")
    assert comparison.candidate_error == pytest.approx(comparison.published_error, rel=1e-3)
    turned = train(copy, ROWS[:, ::-1], names=METRICS[::-1])[1].evaluation.comparison
    assert turned.published_error == pytest.approx(comparison.published_error, rel=0.01)


def test_errors_are_told_in_the_units_of_the_candidate_whatever_the_published_scaler_is(copy):
    """Against what the published model leaves of the raw rows, of which every metric varies otherwise than it knew."""
    rows = ROWS.mean(axis=0) + np.linspace(0.25, 4.0, ROWS.shape[1]) * (ROWS - ROWS.mean(axis=0))
    rows[-7, 2] *= 1e6  # a burst, which counts with its logarithm
    before = load_model(copy / "published" / "telemetry_autoencoder")
    live = train(copy, rows)[1]
    rest = before.residuals(rows[-1200:], rows[:-1200]) / np.asarray(live.scaler.scale)
    size = np.abs(rest)
    counted = np.where(size > 4, 4 * (1 + np.log(np.maximum(size, 4) / 4)), size)
    assert live.evaluation.comparison.published_error == pytest.approx(np.square(counted).mean(), rel=0.01)


def test_a_candidate_that_is_worse_by_more_than_the_margin_is_rejected_unless_all_are_to_be_published(copy, capsys):
    status, live = train(copy, epochs=1)
    assert status == 1
    assert live.sequence == 1
    assert "which is live" in capsys.readouterr().err
    with (copy / "retraind.yaml").open("a") as file:
        file.write("gate: {policy: publish_always}\n")
    status, live = train(copy, epochs=1)
    assert (status, live.sequence) == (0, 2)
    assert live.evaluation.comparison.candidate_error > 1.25 * live.evaluation.comparison.published_error
    assert "gate.policy is publish_always" in next(
        one.message for one in live.gate if one.code == "worse_than_published"
    )


def configure(directory, settings):
    with (directory / "retraind.yaml").open("a") as file:
        file.write(settings)


def test_a_model_of_other_metrics_is_not_compared_and_that_is_said(copy):
    configure(copy, "data: {metrics: own}\n")
    status, live = train(copy, ROWS[:, :7], epochs=1, names=METRICS[:7])
    assert (status, live.sequence) == (0, 2)
    assert live.evaluation.comparison is None
    assert live.evaluation.no_comparison.endswith("is of other metrics: power")


def test_a_rate_is_another_metric_than_the_counter(copy):
    configure(copy, "data: {schema: {power: counter, time: time}}\n")
    rows = np.concatenate([np.arange(len(ROWS))[:, np.newaxis] + 1.78e9, ROWS], axis=1)
    status, live = train(copy, rows, epochs=1, names=["time", *METRICS])
    assert (status, live.dataset.rate_metrics) == (0, ["power"])
    assert live.evaluation.no_comparison.endswith("is of other metrics: power, power per second")


@pytest.mark.parametrize("damage", ["weights.pt", "scorer.pt", "manifest.json", "gone", "cut"])
def test_a_published_version_that_is_damaged_fails_no_job(damage, copy):
    version = (copy / "published" / "telemetry_autoencoder" / "current").resolve()
    version.chmod(0o755)
    if damage == "gone":
        shutil.rmtree(version)
    else:
        path = version / ("weights.pt" if damage == "cut" else damage)
        path.chmod(0o644)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else data.replace(b"0", b"1"))
    file = write_csv(copy / "next.csv", ROWS)
    config = str(copy / "retraind.yaml")
    status = main(["train", str(file), "--epochs", "10", "--batch-size", "512", "--config", config])
    assert status == 0
    (found,) = version.parent.glob("000002-*/manifest.json")
    evaluation = typed_json.decode(found.read_bytes(), Manifest).evaluation
    assert evaluation.comparison is None
    assert "the published version can not be used: " in evaluation.no_comparison


@pytest.mark.parametrize("window", [5, 1, 8])
@pytest.mark.parametrize("limit", [262_144, 2_000], ids=["all rows", "a sample"])
def test_the_alarms_of_the_live_model_in_new_rows_are_counted_whatever_the_candidate_is(
    window, limit, copy, monkeypatch, tmp_path
):
    """As `score` counts them in the raw rows: of all, or of pieces that are spread over them."""
    rows = ROWS[:, ::-1].copy()
    rows[4_000:7_000, 1] += 400.0  # a quarter of the file, in the metric `temperature`
    rows[9, :] = np.nan
    before = load_model(copy / "published" / "telemetry_autoencoder")
    file = write_csv(copy / "next.csv", rows[np.isfinite(rows).all(axis=1)], METRICS[::-1])
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(compare, "MAX_HELDOUT_ROWS", limit)
    order = Order(
        job="", attempt=1, datasets=[str(file)], work_dir=str(work), socket="", device="cpu", log_level="error",
        training=TrainingConfig(epochs=1, window=window, checkpoint_seconds=None), data=DataConfig(),
        published=str(copy / "published" / "telemetry_autoencoder"),
    )  # fmt: skip
    ingested = ingest([file], work, order.data, lambda _: None)
    found = worker.learn(order, ingested, work, Listener()).evaluation.drift
    kept = rows[np.isfinite(rows).all(axis=1)][:, ::-1]
    share = (before.score(kept) > 1).mean()
    assert 0.2 < share < 0.3
    assert found.version == before.version
    assert found.expected_share == before.manifest.evaluation.threshold.expected_share
    if limit > len(rows):
        assert found.num_rows == len(kept)
        assert found.num_alarms == pytest.approx(share * len(kept), abs=3)
    else:
        assert limit / 2 < found.num_rows <= limit
        assert found.num_alarms / found.num_rows == pytest.approx(share, abs=0.05)


def test_rows_like_those_it_learned_from_are_no_drift_and_others_are(copy, capsys):
    assert train(copy, clean_rows(12_000, seed=2))[0] == 0
    assert "drifted" not in capsys.readouterr().err
    rows = ROWS.copy()
    rows[6_000:, 6] += 60.0
    train(copy, rows)
    assert "the data has drifted, or a fault lasts in it: " in capsys.readouterr().err


def test_the_first_model_has_none_to_be_compared_with(published):
    live = published / "published" / "telemetry_autoencoder" / "current" / "manifest.json"
    evaluation = typed_json.decode(live.read_bytes(), Manifest).evaluation
    assert (evaluation.comparison, evaluation.no_comparison) == (None, "nothing was published before")
