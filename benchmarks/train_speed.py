"""How fast retraind trains, against the straightforward loop: same rows, same machine, same run.

Variants take turns in rounds, each in a process of its own, so that a busy minute hits both and every peak of memory
is one variant's own. The straightforward loop takes single rows from a DataLoader, steps torch.optim.AdamW and reads
the loss every batch; its first optimizer step, which imports torch's compiler, is done before its clock starts.

    python benchmarks/train_speed.py [--rows 500000] [--epochs 2] [--rounds 3] [--json]
    python benchmarks/train_speed.py --csv        peak memory of a whole job on a CSV file of that many rows
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from retraind import events
from retraind.config import DataConfig, TrainingConfig, decisive
from retraind.job import Order
from retraind.worker import checkpoint, model, train
from retraind.worker.preflight import peak_bytes
from retraind.worker.rows import RowRange

NUM_METRICS = 32
BATCH_SIZE = 2048
SEED = 0
VARIANTS = ("naive", "ours")
MIB = 2**20


class Silence:
    """A listener that is told nothing, so that the loss is read once an epoch by both variants or less."""

    def beat(self, done_share: float | None = None) -> None: ...

    def is_progress_due(self) -> bool:
        return False

    def progress(self, progress: events.Progress) -> None: ...

    def send(self, event: events.Event) -> None: ...


def main() -> int:
    arguments = parse(sys.argv[1:])
    if arguments.child:
        print(json.dumps(run_child(arguments)))
        return 0
    result = measure_csv(arguments) if arguments.csv else measure_speed(arguments)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print_csv(result) if arguments.csv else print_speed(result)
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rows", type=int, default=500_000, help=f"rows of {NUM_METRICS} metrics (default %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=2, help="epochs per run (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both variants (default %(default)s)")
    parser.add_argument(
        "--checkpoint-seconds", type=float, default=60.0, help="between checkpoints of ours (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--csv", action="store_true", help="measure the memory of a whole worker on a CSV file instead")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def run_child(arguments: argparse.Namespace) -> dict[str, float]:
    """Trains one variant in this process: rows a second, loss of the last epoch, peak memory."""
    torch.set_num_threads(arguments.threads)
    run = run_naive if arguments.child == "naive" else run_ours
    rows_per_second, loss = run(
        arguments.file, arguments.rows, arguments.epochs, arguments.threads, arguments.checkpoint_seconds
    )
    return {"rows_per_second": rows_per_second, "loss": loss, "peak_mib": peak_bytes() / MIB}


def run_ours(path: Path, num_rows: int, epochs: int, num_threads: int, every_seconds: float) -> tuple[float, float]:
    rows = RowRange(path, NUM_METRICS, 0, num_rows)
    settings = TrainingConfig(epochs=epochs, batch_size=BATCH_SIZE, seed=SEED, num_threads=num_threads)
    identity = checkpoint.identity_of(
        job="benchmark",
        dataset="",
        metric_names=[f"m{index:02}" for index in range(NUM_METRICS)],
        num_rows=num_rows,
        device="cpu",
        precision="float32",
        training=decisive(settings),
        data=DataConfig(),
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        checkpoints = checkpoint.Checkpoints(Path(directory) / "checkpoint", identity, every_seconds)
        _, report = train.train(rows, settings, torch.device("cpu"), Silence(), checkpoints)
    return report.rows_per_second, report.epoch_losses[-1]


def run_naive(path: Path, num_rows: int, epochs: int, _num_threads: int, _every_seconds: float) -> tuple[float, float]:
    """Written as one would the first time: a sample at a time, and the loss read on every step."""
    samples = torch.from_numpy(np.fromfile(path, dtype="<f4").reshape(num_rows, NUM_METRICS))
    loader = DataLoader(TensorDataset(samples, samples), batch_size=BATCH_SIZE, shuffle=True)
    warm_up_optimizer()
    autoencoder = model.build(NUM_METRICS, SEED).train()
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=1e-3, weight_decay=1e-4)
    criterion = nn.MSELoss()
    epoch_loss = 0.0
    started_at = time.perf_counter()
    for _ in range(epochs):
        epoch_loss = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(autoencoder(inputs), targets)
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item() * len(inputs)
    return num_rows * epochs / (time.perf_counter() - started_at), epoch_loss / num_rows


def warm_up_optimizer() -> None:
    """Takes the first step's imports out of the comparison."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()


def measure_speed(arguments: argparse.Namespace) -> dict[str, object]:
    """All rounds of both variants, as medians with their range; the ratio is of the medians."""
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rows.f32"
        np.random.default_rng(SEED).standard_normal((arguments.rows, NUM_METRICS), dtype=np.float32).tofile(file)
        for _ in range(arguments.rounds):
            for variant in VARIANTS:
                runs[variant].append(start_child(variant, file, arguments))
    result: dict[str, object] = {variant: summary(runs[variant]) for variant in VARIANTS}
    speeds = {variant: statistics.median(run["rows_per_second"] for run in runs[variant]) for variant in VARIANTS}
    result["ratio"] = speeds["ours"] / speeds["naive"]
    result["setting"] = {
        "rows": arguments.rows,
        "metrics": NUM_METRICS,
        "epochs": arguments.epochs,
        "rounds": arguments.rounds,
        "batch_size": BATCH_SIZE,
        "threads": arguments.threads,
        "checkpoint_seconds": arguments.checkpoint_seconds,
    }
    result["machine"] = machine()
    return result


def start_child(variant: str, file: Path, arguments: argparse.Namespace) -> dict[str, float]:
    options = ["--rows", arguments.rows, "--epochs", arguments.epochs, "--threads", arguments.threads, "--file", file]
    options += ["--checkpoint-seconds", arguments.checkpoint_seconds]
    command = [sys.executable, __file__, "--child", variant, *map(str, options)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return dict(json.loads(output))


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    speeds = [run["rows_per_second"] for run in runs]
    return {
        "rows_per_second": statistics.median(speeds),
        "rows_per_second_min": min(speeds),
        "rows_per_second_max": max(speeds),
        "loss": statistics.median(run["loss"] for run in runs),
        "peak_mib": max(run["peak_mib"] for run in runs),
    }


def machine() -> dict[str, object]:
    return {
        "processor": platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def measure_csv(arguments: argparse.Namespace) -> dict[str, object]:
    """Runs the real worker on a CSV file, with a listener in place of the supervisor."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        dataset = directory / "rows.csv"
        write_csv(dataset, arguments.rows)
        work_dir = directory / "work"
        work_dir.mkdir()
        order = Order(
            job="benchmark",
            attempt=1,
            datasets=[str(dataset)],
            work_dir=str(work_dir),
            socket=str(directory / "events"),
            device="cpu",
            training=TrainingConfig(epochs=arguments.epochs, num_threads=arguments.threads),
            data=DataConfig(),
            log_level="info",
        )
        order_file = directory / "order.json"
        order_file.write_bytes(msgspec.json.encode(order))
        started_at = time.perf_counter()
        received = run_worker(order_file, Path(order.socket))
        seconds = time.perf_counter() - started_at
        num_bytes = dataset.stat().st_size
    last = received[-1]
    if not isinstance(last, events.Finished):
        raise SystemExit(f"the worker did not finish: {last}")
    return {
        "rows": arguments.rows,
        "csv_mib": num_bytes / MIB,
        "peak_mib": last.peak_bytes / MIB,
        "seconds": seconds,
        "machine": machine(),
    }


def write_csv(path: Path, num_rows: int) -> None:
    """Seeded rows with six digits, a block at a time."""
    generator = np.random.default_rng(SEED)
    with path.open("w", encoding="ascii") as file:
        file.write(",".join(f"metric_{index}" for index in range(NUM_METRICS)) + "\n")
        for start in range(0, num_rows, 10_000):
            rows = generator.standard_normal((min(10_000, num_rows - start), NUM_METRICS))
            file.writelines(",".join([f"{value:.6g}" for value in row]) + "\n" for row in rows.tolist())


def run_worker(order_file: Path, address: Path) -> list[events.Event]:
    """Starts the worker and returns the events that it sent until it ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(address))
        server.listen(1)
        server.settimeout(0.2)
        with subprocess.Popen([sys.executable, "-m", "retraind.worker", str(order_file)]) as worker:
            connection = accept(server, worker)
            with connection, connection.makefile("rb") as lines:
                return [event for line in lines if (event := events.decode(line)[1]) is not None]


def accept(server: socket.socket, worker: subprocess.Popen[bytes]) -> socket.socket:
    """Waits for the worker to connect, as long as it lives."""
    while worker.poll() is None:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        connection.setblocking(True)
        return connection
    raise SystemExit(f"the worker ended with status {worker.returncode} before it connected")


def print_speed(result: dict[str, object]) -> None:
    print(f"{'':8}{'rows/s':>12}{'min':>12}{'max':>12}{'peak MiB':>10}{'loss':>10}")
    for variant in VARIANTS:
        row = result[variant]
        assert isinstance(row, dict)
        speeds = "".join(
            f"{row[key]:>12,.0f}" for key in ("rows_per_second", "rows_per_second_min", "rows_per_second_max")
        )
        print(f"{variant:8}{speeds}{row['peak_mib']:>10.0f}{row['loss']:>10.5f}")
    print(f"ratio {result['ratio']:.1f}   {result['setting']}   {result['machine']}")


def print_csv(result: dict[str, object]) -> None:
    print(
        f"worker on {result['rows']} rows of CSV ({result['csv_mib']:.0f} MiB): "
        f"peak {result['peak_mib']:.0f} MiB, {result['seconds']:.1f} s, {result['machine']}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
