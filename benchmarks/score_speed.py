"""How fast a published model scores an array, against torch's plain forward pass of the same network in the same run.

The plain pass gets rows that are scaled already, all at once, and yields a reconstruction of each row alone; scoring
begins with raw float32 values, looks at windows and linear paths as well, and ends with a score for each row. They take
turns, so that a busy machine slows both. `--json` prints the result for scripts.
"""

# N rows, D metrics
# ruff: noqa: N806  (arrays carry their shape)

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np
import torch

from retraind import report
from retraind.worker.detector import Detector
from retraind.worker.linear import LinearPath
from retraind.worker.model import build, shape_of
from retraind.worker.scorer import NUM_COMPONENTS, NUM_LONG_COMPONENTS, Path, Scorer, reach


def detector_of(num_metrics: int, window: int) -> Detector:
    """A model with weights as they are before training: their values do not matter to the clock."""
    names = [f"metric_{place}" for place in range(num_metrics)]
    manifest = report.Manifest(
        version="000001-0", sequence=1, model_name="benchmark", published_at=datetime.now(UTC), job="",
        weights_sha256="", weights_bytes=0, shape=shape_of(num_metrics * window, window), metric_names=names,
        scaler=report.Scaler(centre=[5.0] * num_metrics, scale=[2.0] * num_metrics, soft_limit=4.0), threshold=1.0,
        dataset=report.Dataset(
            name="", sha256="", num_bytes=0, format="", num_rows=0, num_dropped={}, metric_names=names,
            ignored_columns=[],
        ),
        training=report.TrainingReport(
            epochs=1, batch_size=2, num_steps=0, epoch_losses=[], seconds=0.0, rows_per_second=0.0, device="cpu",
            device_name="", precision="float32", seed=0,
        ),
        evaluation=report.Evaluation(num_heldout_rows=0, heldout_loss=1.0, mean_loss=1.0), versions={},
    )  # fmt: skip
    usual_D = torch.ones(num_metrics)
    paths = [Path(usual_D), Path(usual_D, linear_path(num_metrics * window, NUM_COMPONENTS))]
    if window > 1:
        paths.append(Path(usual_D, linear_path(num_metrics * reach(window), NUM_LONG_COMPONENTS)))
    network = build(num_metrics * window, seed=0).eval()
    return Detector(manifest, Scorer(network, window, paths, torch.device("cpu")))


def linear_path(width: int, num_components: int) -> LinearPath:
    axes_FF = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)))[0]
    return LinearPath(torch.zeros(width), axes_FF[:, :num_components].contiguous())


def rows_per_second(work: Callable[[], object], num_rows: int) -> float:
    started_at = time.perf_counter()
    work()
    return num_rows / (time.perf_counter() - started_at)


def measure(num_rows: int, num_metrics: int, window: int, num_rounds: int, num_threads: int) -> dict[str, object]:
    """Speeds of both in every round, the first left out: it pays for pages and caches."""
    rows_ND = np.random.default_rng(0).normal(5.0, 2.0, (num_rows, num_metrics)).astype(np.float32)
    detector, network = detector_of(num_metrics, window), build(num_metrics, seed=0).eval()
    x_ND = torch.from_numpy((rows_ND - 5.0) / 2.0)
    speeds: dict[str, list[float]] = {"plain": [], "score": []}
    torch.set_num_threads(num_threads)
    with torch.no_grad():
        for _ in range(num_rounds + 1):
            speeds["plain"].append(rows_per_second(lambda: network(x_ND), num_rows))
            speeds["score"].append(rows_per_second(lambda: detector.score(rows_ND), num_rows))
    median = {name: statistics.median(found[1:]) for name, found in speeds.items()}
    return {
        "setting": {
            "rows": num_rows,
            "metrics": num_metrics,
            "window": window,
            "rounds": num_rounds,
            "threads_of_plain": num_threads,
        },
        "machine": {"num_cpus": len(os.sched_getaffinity(0)), "torch": torch.__version__, "load": os.getloadavg()[0]},
        "rows_per_second": median,
        "range": {name: [min(found[1:]), max(found[1:])] for name, found in speeds.items()},
        "ratio": median["score"] / median["plain"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the array")
    parser.add_argument("--metrics", type=int, default=32, help="metrics of a row")
    parser.add_argument("--window", type=int, default=1, help="rows that the model sees at once")
    parser.add_argument("--rounds", type=int, default=5, help="how often both take their turn")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the plain pass")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = measure(arguments.rows, arguments.metrics, arguments.window, arguments.rounds, arguments.threads)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for name, speed in found["rows_per_second"].items():  # type: ignore[attr-defined]
        low, high = found["range"][name]  # type: ignore[index]
        print(f"{name:<6} {speed:>12,.0f} rows/s ({low:,.0f}-{high:,.0f})")
    print(f"ratio  {found['ratio']:.2f}, load {found['machine']['load']:.1f}")  # type: ignore[index]


if __name__ == "__main__":
    main()
