"""How well the published model finds labelled faults, beside what people would use instead, on the same rows.

    python benchmarks/quality.py --data DIR [--sets smd,asd,skab] [--seeds 3] [--missing 0.05] [--json]

DIR holds the public sets as they are distributed here: smd/ and asd/ with NAME_train.csv.gz, NAME_test.csv.gz and
NAME_test_label.csv.gz, skab/ with labelled runs of which the first 400 rows are for training. The model is trained with
the default configuration by the worker's own code, from a CSV file, written as a version and loaded as by a consumer.

Two figures, means over machines and seeds, point by point: average precision, and VUS-PR (Paparrizos et al., 2022), for
which a label counts in part up to some rows before and after it. Never point-adjusted F1: a random score gets 0.87
with it. Labels are used for these figures only.
"""

# N rows, D metrics, F = window x metrics, K components
# ruff: noqa: N803, N806, N815  (arrays carry their shape)

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from retraind import load_model, report
from retraind.config import DataConfig, TrainingConfig
from retraind.job import Order
from retraind.worker import main as worker
from retraind.worker.ingest import ingest
from retraind.worker.model import build

Floats = NDArray[np.float64]
Score = Callable[[Floats, Floats, int], Floats]

NUM_TRAINING_ROWS_OF_SKAB = 400
# Rows around a label that count in part: as the figures of the peers were made.
MAX_BUFFERS = {"smd": 100, "asd": 100, "skab": 50}
NUM_THRESHOLDS = 250


@dataclass(frozen=True)
class Machine:
    """Rows to train on, rows to score, and which of those are faulty."""

    name: str
    training_ND: Floats
    test_ND: Floats
    labels_N: NDArray[np.bool_]


def machines(data: Path, name: str) -> Iterator[Machine]:
    """One labelled set, in the order of names."""
    if name == "skab":
        for path in sorted(data.glob("skab/*/*.csv")):
            table = pd.read_csv(path, sep=";")
            if "anomaly" not in table:
                continue
            rows_ND = table.drop(columns=["datetime", "anomaly", "changepoint"]).to_numpy(float)
            cut = NUM_TRAINING_ROWS_OF_SKAB
            yield Machine(path.stem, rows_ND[:cut], rows_ND[cut:], table["anomaly"].to_numpy()[cut:] > 0)
        return
    for path in sorted((data / name).glob("*_train.csv.gz")):
        stem = str(path).removesuffix("_train.csv.gz")
        training, test, labels = (
            pd.read_csv(f"{stem}_{part}.csv.gz", header=None).to_numpy(float)
            for part in ("train", "test", "test_label")
        )
        yield Machine(Path(stem).name, training, test, labels.ravel() > 0)


def average_precision(labels_N: NDArray[np.bool_], scores_N: Floats) -> float:
    """The area below precision over recall, rows of equal score counted together."""
    order = np.argsort(-scores_N, kind="stable")
    hits_N = np.cumsum(labels_N[order])
    last_of_ties = np.append(np.flatnonzero(np.diff(scores_N[order])), len(order) - 1)
    found = hits_N[last_of_ties]
    return float(np.sum(np.diff(found, prepend=0) / labels_N.sum() * found / (last_of_ties + 1)))


def segments(mask_N: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Half-open ranges of consecutive rows that are set."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask_N.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def vus_pr(labels_N: NDArray[np.bool_], scores_N: Floats, max_buffer: int) -> float:
    """The volume below precision over recall for buffers of 0 to `max_buffer` rows around labels."""
    num_rows, num_labels = len(labels_N), labels_N.sum()
    order = np.argsort(-scores_N, kind="stable")
    ranked_N = scores_N[order]
    thresholds = ranked_N[np.linspace(0, num_rows - 1, NUM_THRESHOLDS).astype(int)]
    counts = np.searchsorted(-ranked_N, -thresholds, side="right")
    volume = 0.0
    for buffer in range(max_buffer + 1):
        weights_N = _with_buffers(labels_N, buffer)
        tops = np.array([scores_N[start:stop].max() for start, stop in segments(weights_N > 0)])
        share_of_events = (tops >= thresholds[:, None]).mean(axis=1)
        hits = np.cumsum(np.where(labels_N, 1.0, weights_N)[order])[counts - 1]
        beside = np.cumsum(np.where(labels_N, 0.0, weights_N)[order])[counts - 1]
        recall = np.minimum(hits / ((2 * num_labels + beside) / 2), 1) * share_of_events
        volume += float(np.dot(np.diff(recall, prepend=0), hits / counts))
    return volume / (max_buffer + 1)


def _with_buffers(labels_N: NDArray[np.bool_], buffer: int) -> Floats:
    weights_N = labels_N.astype(float)
    for start, stop in segments(labels_N):
        distance = np.arange(1, buffer // 2 + 1)
        weight = np.sqrt(1 - distance / max(buffer, 1))
        before, after = start - distance, stop - 1 + distance
        weights_N[before[before >= 0]] += weight[before >= 0]
        weights_N[after[after < len(labels_N)]] += weight[after < len(labels_N)]
    return np.asarray(np.minimum(weights_N, 1.0))


class Silent:
    """Whom the worker tells how it goes."""

    def beat(self, done_share: float | None = None) -> None: ...
    def is_progress_due(self) -> bool:
        return False

    def progress(self, progress: object) -> None: ...
    def send(self, event: object) -> None: ...


def retraind(training_ND: Floats, test_ND: Floats, seed: int) -> Floats:
    """The default configuration, from a file to a version to scores."""
    with tempfile.TemporaryDirectory() as name:
        candidate = learned(training_ND, seed, Path(name))
        manifest = report.manifest_of(candidate, "000001-0", 1, "quality", "", datetime.now(UTC))
        (Path(name) / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        return np.asarray(load_model(name).score(test_ND), dtype=float)


def learned(
    training_ND: Floats, seed: int, work_dir: Path, home: Path | None = None, *, warm_start: bool = False
) -> report.Candidate:
    """What a worker makes of the rows, with its files in `work_dir`; `home` has the version that is live."""
    pd.DataFrame(training_ND).to_csv(work_dir / "training.csv", header=False, index=False)
    training, data = TrainingConfig(seed=seed, checkpoint_seconds=None, warm_start=warm_start), DataConfig()
    order = Order(
        job="", attempt=1, datasets=[str(work_dir / "training.csv")], work_dir=str(work_dir), socket="", device="cpu",
        training=training, data=data, log_level="error", published="" if home is None else str(home),
    )  # fmt: skip
    ingested = ingest([work_dir / "training.csv"], work_dir, data, lambda _: None)
    return worker.learn(order, ingested, work_dir, Silent())  # type: ignore[arg-type]


def print_spread(name: str, found: list[Machine], num_seeds: int) -> None:
    """How far seeds alone move the held-out loss of one machine's model: the highest by the lowest."""
    ratios = []
    for machine in found:
        with tempfile.TemporaryDirectory() as work_dir:
            losses = [
                learned(machine.training_ND, seed, Path(work_dir)).evaluation.heldout_loss for seed in range(num_seeds)
            ]
        ratios.append(max(losses) / min(losses))
    print(f"{name:<5} held-out loss, highest by lowest of {num_seeds} seeds: median {statistics.median(ratios):.2f}, "
          f"at most {max(ratios):.2f}")  # fmt: skip


def print_later(name: str, found: list[Machine]) -> None:
    """How the second half of each machine's training part looks to a model of the first; what a warm start gains."""
    for machine in found:
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory)
            version = home / "versions" / "000001-000000000000"
            version.mkdir(parents=True)
            first_ND, second_ND = np.array_split(machine.training_ND, 2)
            manifest = report.manifest_of(learned(first_ND, 0, version), version.name, 1, "", "", datetime.now(UTC))
            (version / "manifest.json").write_bytes(msgspec.json.encode(manifest))
            (home / "current").symlink_to(f"versions/{version.name}")
            drawn = learned(second_ND, 0, home, home).evaluation
            warm = learned(second_ND, 0, home, home, warm_start=True).evaluation
            normal = load_model(home).score(machine.test_ND)[~machine.labels_N] > 1
        drift = drawn.drift
        assert drift is not None
        print(f"{name:<5} {machine.name:<12} above the threshold: second half {drift.num_alarms / drift.num_rows:.4f}, "
              f"normal rows of the test part {normal.mean():.4f} (expected {drift.expected_share:.4f}); "
              f"held-out loss {drawn.heldout_loss:.4f}, warm {warm.heldout_loss:.4f}", flush=True)  # fmt: skip


def z_scores(training_ND: Floats, test_ND: Floats) -> tuple[Floats, Floats]:
    """Centred, in deviations; constant metrics and missing values are 0."""
    mean_D, std_D = np.nanmean(training_ND, axis=0), np.nanstd(training_ND, axis=0)
    scale_D = np.where(std_D < 1e-9, np.inf, std_D)
    first, second = (np.nan_to_num((rows_ND - mean_D) / scale_D) for rows_ND in (training_ND, test_ND))
    return first, second


def length_of_z(training_ND: Floats, test_ND: Floats, _seed: int) -> Floats:
    """The plain length of the vector of z-scores."""
    return np.asarray(np.sqrt((z_scores(training_ND, test_ND)[1] ** 2).sum(axis=1)))


def pca(window: int, num_components: int) -> Score:
    """Squared error of rebuilding windows from principal components."""

    def score(training_ND: Floats, test_ND: Floats, _seed: int) -> Floats:
        first, second = (stacked(rows_ND, window) for rows_ND in z_scores(training_ND, test_ND))
        mean_F = first[window - 1 :].mean(axis=0)
        covariance_FF = np.cov(first[window - 1 :].T)
        axes_FK = np.linalg.eigh(covariance_FF)[1][:, -min(num_components, len(mean_F) - 1) :]
        rest_NF = (second - mean_F) - (second - mean_F) @ axes_FK @ axes_FK.T
        return np.asarray((rest_NF**2).sum(axis=1))

    return score


def stacked(rows_ND: Floats, window: int) -> Floats:
    padded = np.vstack([np.repeat(rows_ND[:1], window - 1, axis=0), rows_ND])
    views = np.lib.stride_tricks.sliding_window_view(padded, window, axis=0)
    return np.asarray(views.transpose(0, 2, 1).reshape(len(rows_ND), -1))


def straightforward(training_ND: Floats, test_ND: Floats, seed: int) -> Floats:
    """The same net as it is usually trained: five epochs of 2048 rows, each row alone, mean squared error."""
    first, second = (torch.from_numpy(rows).float() for rows in z_scores(training_ND, test_ND))
    model = build(first.shape[1], seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(5):
        for batch in torch.randperm(len(first), generator=generator).split(2048):  # type: ignore[no-untyped-call]
            optimizer.zero_grad(set_to_none=True)
            nn.functional.mse_loss(model(first[batch]), first[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        return np.asarray((model.eval()(second) - second).square().mean(dim=1).double().numpy())


def pyod_autoencoder(training_ND: Floats, test_ND: Floats, seed: int) -> Floats:
    """PyOD's AutoEncoder with its defaults. Raises ImportError where it is not installed."""
    from pyod.models.auto_encoder import AutoEncoder  # type: ignore[import-not-found]  # noqa: PLC0415

    first, second = z_scores(training_ND, test_ND)
    model = AutoEncoder(random_state=seed, verbose=0)
    model.fit(first)
    return np.asarray(model.decision_function(second))


def sklearn_mlp(training_ND: Floats, test_ND: Floats, seed: int) -> Floats:
    """scikit-learn's MLPRegressor as an autoencoder. Raises ImportError where it is not installed."""
    from sklearn.neural_network import MLPRegressor  # type: ignore[import-not-found]  # noqa: PLC0415

    first, second = z_scores(training_ND, test_ND)
    model = MLPRegressor(hidden_layer_sizes=(24, 8, 24), random_state=seed, early_stopping=True).fit(first, first)
    return np.asarray(((model.predict(second) - second) ** 2).mean(axis=1))


PEERS: dict[str, Score] = {
    "length of z-scores": length_of_z,
    "straightforward": straightforward,
    "PCA-8": pca(1, 8),
    "PCA-16, window 5": pca(5, 16),
    "PCA-24, window 20": pca(20, 24),
    "PyOD AutoEncoder": pyod_autoencoder,
    "scikit-learn MLP": sklearn_mlp,
}


def measure(score: Score, found: list[Machine], max_buffer: int, num_seeds: int, missing: float) -> dict[str, float]:
    """Means over machines and seeds; the spread is of the seeds' means of average precision."""
    precisions: list[list[float]] = [[] for _ in range(num_seeds)]
    volumes, seconds = [], []
    for machine in found:
        for seed in range(num_seeds):
            training_ND, test_ND = (
                with_holes(rows_ND, missing, seed) for rows_ND in (machine.training_ND, machine.test_ND)
            )
            started_at = time.perf_counter()
            scores_N = np.nan_to_num(score(training_ND, test_ND, seed))
            seconds.append(time.perf_counter() - started_at)
            precisions[seed].append(average_precision(machine.labels_N, scores_N))
            volumes.append(vus_pr(machine.labels_N, scores_N, max_buffer))
    by_seed = [statistics.mean(values) for values in precisions]
    return {
        "average_precision": statistics.mean(by_seed),
        "vus_pr": statistics.mean(volumes),
        "spread_of_seeds": max(by_seed) - min(by_seed),
        "seconds": statistics.mean(seconds),
        "max_seconds": max(seconds),
    }


def with_holes(rows_ND: Floats, share: float, seed: int) -> Floats:
    """The rows with a share of their values missing."""
    if not share:
        return rows_ND
    holes_ND = np.random.default_rng(seed).random(rows_ND.shape) < share
    return np.where(holes_ND, np.nan, rows_ND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the directory of the sets")
    parser.add_argument("--sets", default="smd,asd,skab", help="which of them (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="how often each is trained (default %(default)s)")
    parser.add_argument("--missing", type=float, default=0.0, help="share of values that are taken away")
    parser.add_argument("--only", action="store_true", help="without the peers")
    parser.add_argument("--spread", action="store_true", help="only how far seeds move the held-out loss")
    parser.add_argument("--later", action="store_true", help="only drift and warm start, half a training part later")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, dict[str, object]] = {}
    for name in arguments.sets.split(","):
        found = list(machines(arguments.data, name))
        if not found:
            parser.error(f"{arguments.data} has no {name}")
        if arguments.spread:
            print_spread(name, found, arguments.seeds)
            continue
        if arguments.later:
            print_later(name, found)
            continue
        ours = measure(retraind, found, MAX_BUFFERS[name], arguments.seeds, arguments.missing)
        result[name] = {**ours, "machines": len(found), "peers": {}}
        if not arguments.json:
            print_line(name, "retraind", ours)
        for peer, score in ({} if arguments.only else PEERS).items():
            try:
                theirs = measure(score, found, MAX_BUFFERS[name], arguments.seeds, arguments.missing)
            except ImportError:
                continue
            result[name]["peers"][peer] = theirs  # type: ignore[index]
            if not arguments.json:
                print_line(name, peer, theirs)
    if arguments.json:
        machine = {"num_cpus": len(os.sched_getaffinity(0)), "torch": torch.__version__, "load": os.getloadavg()[0]}
        print(json.dumps({**result, "machine": machine, "seeds": arguments.seeds}, indent=2))


def print_line(name: str, who: str, found: dict[str, float]) -> None:
    print(
        f"{name:<5} {who:<20} AP {found['average_precision']:.3f}  VUS-PR {found['vus_pr']:.3f}  "
        f"seeds +-{found['spread_of_seeds'] / 2:.3f}  {found['seconds']:.1f} s (at most {found['max_seconds']:.1f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
