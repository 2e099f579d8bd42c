"""Made-up telemetry whose metrics hang together, and a model of it, published by the code that publishes."""

import csv

import msgspec
import numpy as np

from retraind import typed_json
from retraind.cli import main
from retraind.report import Manifest

METRICS = ["load", "cpu", "memory_bytes", "disk", "network_bytes", "latency", "temperature", "power"]
_GAIN = np.array([1.0, 0.4, 8e9, 120.0, 3e7, 0.02, 25.0, 140.0])
_BASE = np.array([0.2, 0.1, 4e9, 10.0, 1e6, 0.004, 38.0, 60.0])


def clean_rows(num_rows, seed):
    """Two hidden causes, a daily load and a disk's, and 3% of noise in each metric. Shape (num_rows, 8)."""
    rng = np.random.default_rng(seed)
    load = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(num_rows) / 1440) + rng.normal(0, 0.05, num_rows)
    disk = rng.uniform(0, 1, num_rows)
    causes = np.stack([load, load, 0.7 * load + 0.3 * disk, disk, load, 0.5 * load + 0.5 * disk, load, load], axis=1)
    return _BASE + _GAIN * (causes + rng.normal(0, 0.03, causes.shape))


def write_csv(path, rows, names=METRICS, times=True):
    """A file as a producer writes it; with `times` a time stamp and a host stand before the metrics."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*(["timestamp", "host"] if times else []), *names])
        for number, row in enumerate(rows):
            cells = [value if isinstance(value, str) else repr(float(value)) for value in row]
            table.writerow([*([f"2026-01-01T{number:05d}", "a"] if times else []), *cells])
    return path


def publish(directory, rows, epochs=60, settings=""):
    """Trains and publishes by the command; the model's directory."""
    config = directory / "retraind.yaml"
    config.write_text("models: {dir: published}\nspool: {dir: spool}\nstate: {dir: state}\n" + settings)
    file = write_csv(directory / "training.csv", rows)
    assert main(["train", str(file), "--epochs", str(epochs), "--batch-size", "512", "--config", str(config)]) == 0
    home = directory / "published" / "telemetry_autoencoder"
    manifest = typed_json.decode((home / "current" / "manifest.json").read_bytes(), Manifest)
    assert manifest.evaluation.heldout_loss < manifest.evaluation.mean_loss, msgspec.json.encode(manifest.evaluation)
    return home
