"""Valid values of the vocabulary, one call each: a test spells out only what it is about."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from retraind import events, report
from retraind.job import Job, JobState
from retraind.report import Candidate, Dataset

NOW = datetime(2026, 11, 30, 22, 52, 12, tzinfo=UTC)
LATER = datetime(2026, 11, 30, 22, 53, 0, tzinfo=UTC)
JOB_ID = "20261130T225212Z-1f3a"
# A name from data that a page must not take for markup.
HOSTILE = "</script></style><img src=x onerror=\"alert('1')\">&amp;"
OTHER_ID = "20261130T225213Z-2b4c"


def make_job(**changes: Any) -> Job:
    """A job that waits for its first attempt."""
    values = {"id": JOB_ID, "name": "node-42.csv", "state": JobState.QUEUED, "created_at": NOW, "updated_at": NOW}
    return Job(**{**values, **changes})


def make_dataset(**changes: Any) -> Dataset:
    """Ten rows of two metrics."""
    values = {
        "name": "node-42.csv", "sha256": "ab" * 32, "num_bytes": 120, "format": "csv", "num_rows": 10,
        "num_dropped": {"missing": 1}, "metric_names": ["cpu", "load"],
        "ignored_columns": [report.IgnoredColumn(name="time", reason="not_numeric")],
    }  # fmt: skip
    return Dataset(**{**values, **changes})


def make_tensors() -> list[report.TensorFact]:
    """As read back from a file in order; names and shapes are only compared."""
    return [
        report.TensorFact(name="encoder.0.weight", shape=[24, 2], dtype="float32", is_finite=True),
        report.TensorFact(name="encoder.1.running_var", shape=[24], dtype="float32", is_finite=True),
    ]


def make_training(**changes: Any) -> report.TrainingReport:
    """Five epochs on a CPU."""
    values = {
        "epochs": 5, "batch_size": 2048, "num_steps": 5, "epoch_losses": [1.0, 0.8, 0.7, 0.6, 0.5], "seconds": 0.5,
        "rows_per_second": 100.0, "device": "cpu", "device_name": "a processor", "precision": "float32", "seed": 0,
    }  # fmt: skip
    return report.TrainingReport(**{**values, **changes})


def make_candidate(weights: bytes = b"weights", **changes: Any) -> Candidate:
    """A candidate that the gate accepts, measured from these bytes."""
    values = {
        "weights_sha256": hashlib.sha256(weights).hexdigest(), "weights_bytes": len(weights),
        "shape": report.ModelShape(input_dim=2, hidden_dim=24, latent_dim=8), "dataset": make_dataset(),
        "scaler": report.Scaler(centre=[0.5, 2.0], scale=[0.1, 1.0]), "training": make_training(),
        "evaluation": report.Evaluation(num_heldout_rows=1, heldout_loss=0.5, mean_loss=1.0, pca_loss=0.75),
        "tensors": make_tensors(), "expected": make_tensors(), "versions": {"retraind": "0.1.0"},
    }  # fmt: skip
    return Candidate(**{**values, **changes})


def leave_siblings(work_dir: Path, files: dict[str, bytes]) -> list[report.SiblingFile]:
    """What a worker leaves beside its weights, and says of it."""
    work_dir.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (work_dir / name).write_bytes(data)
    return [
        report.SiblingFile(name=name, sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
        for name, data in files.items()
    ]


def leave_candidate(work_dir: Path, weights: bytes = b"weights") -> Candidate:
    """What a worker that has finished leaves in its work directory."""
    candidate = make_candidate(weights)
    work_dir.mkdir(parents=True, exist_ok=True)
    (work_dir / "weights.pt").write_bytes(weights)
    (work_dir / "candidate.json").write_bytes(msgspec.json.encode(candidate))
    return candidate


def make_manifest(names: list[str], **changes: object) -> report.Manifest:
    """A version of which everything is known."""
    blamed = [report.MetricShare(name=names[0], share=0.62, z=-8.3)]
    evaluation = report.Evaluation(
        num_heldout_rows=1000, heldout_loss=0.25, mean_loss=1.0, pca_loss=0.2,
        threshold=report.Threshold(value=0.5, target_share=0.001, expected_share=0.001, num_rows=1000),
        metric_errors=[0.5 / (1 + index) for index in range(len(names))],
        histogram=report.Histogram(edges=[0.0, 0.5, 1.0, 1.5], counts=[900, 99, 1]),
        scores=report.ScoreSeries(first_row=9000, rows_per_point=10, maxima=[0.2, 0.3, 7.5, 0.1]),
        worst_rows=[report.ScoredRow(row=9023, score=7.5, metrics=blamed)],
        comparison=report.Comparison(
            version="000041-aaaaaaaaaaaa", published_error=0.5, candidate_error=0.25, num_rows=1000
        ),
    )  # fmt: skip
    dataset = make_dataset(
        name=names[0], metric_names=names, constant_metrics=names[:1], num_dropped={"missing": 3},
        ignored_columns=[report.IgnoredColumn(name=names[0], reason="label")],
        problems=[report.Problem(line=7, reason="missing", column=2, text=names[0])],
        num_missing_cells=4, most_missing=[report.MissingCells(name=names[0], num_cells=4)],
    )  # fmt: skip
    candidate = make_candidate(
        dataset=dataset, evaluation=evaluation, versions={"torch": names[0]},
        scaler=report.Scaler(centre=[1.5] * len(names), scale=[2.5] * len(names)),
        training=make_training(heldout_losses=[1.1, 0.9, 0.8, 0.7, 0.65], device_name=names[0]),
        checks=[report.Check(name="host.disk", status="warn", message=names[0], remedy="make room")],
        gpus=[report.Gpu(index=0, uuid=names[0], name=names[0], driver_version=names[0], is_chosen=True)],
    )  # fmt: skip
    gate = [report.Criterion(code="wrong_tensors", passed=True, message=names[0])]
    manifest = report.manifest_of(candidate, "000042-bbbbbbbbbbbb", 42, "telemetry_autoencoder", JOB_ID, NOW, gate)
    return msgspec.structs.replace(manifest, replaces="000041-aaaaaaaaaaaa", **changes)


def make_bare() -> report.Manifest:
    """As the first release wrote them."""
    return report.manifest_of(make_candidate(), "000001-bbbbbbbbbbbb", 1, "telemetry_autoencoder", JOB_ID, NOW)


def make_events() -> list[events.Event]:
    """One event of each kind, every field in use."""
    check = report.Check(name="host.disk", status="warn", message="900 MiB free", remedy="make room")
    problem = report.Problem(line=7, reason="missing", column=2, text="n/a")
    return [
        events.Hello(pid=4321, python="3.13.5"),
        events.Stage(name="ingest"),
        events.Checked(checks=[check]),
        events.Ingested(dataset=make_dataset(constant_metrics=["load"], problems=[problem])),
        events.Progress(epoch=3, epochs=5, loss=0.7413, rows_per_second=512e3, seconds_left=8.0, device="cpu"),
        events.Resumed(epoch=2, epochs=5, num_steps=30),
        events.Checkpointed(epoch=3, epochs=5, num_steps=41, num_bytes=65_536),
        events.Heartbeat(done_share=0.25),
        events.Finished(weights_sha256="cd" * 32, peak_bytes=1024),
        events.Failed(code="malformed", message="no number: 'x'", line=3, column=2, remedy="look at line 3"),
    ]
