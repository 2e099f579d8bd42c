"""How fast retraind reads a dataset, against the field's own readers reading the same file at once.

Three ways take turns in rounds, each in a process of its own, so that a busy minute hits all and every peak of memory
is one way's own: `whole` is all that a job does before it trains (read, hash, check, moments, scaled float32 rows on
disk), `reader` the same without moments and rows on disk, `theirs` is pandas for CSV and JSON lines, pyarrow in one
thread for Parquet. The file is read once before, so that it comes from memory. Speeds are of the file's bytes.

    python benchmarks/read_speed.py [--rows 300000] [--rounds 3] [--format csv] [--json]
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from retraind.config import DataConfig
from retraind.worker.ingest import ingest
from retraind.worker.preflight import peak_bytes
from retraind.worker.readers import open_reader
from retraind.worker.readers.columns import choose_metrics
from retraind.worker.readers.source import Source
from retraind.worker.readers.tally import Tally

NUM_METRICS = 32
SEED = 0
FORMATS = ("csv", "jsonl", "parquet")
WAYS = ("whole", "reader", "theirs")
MIB = 2**20


def main() -> int:
    arguments = parse(sys.argv[1:])
    if arguments.way:
        print(json.dumps(run_way(arguments.way, arguments.file)))
        return 0
    result = measure(arguments)
    print(json.dumps(result, indent=2) if arguments.json else table(result))
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rows", type=int, default=300_000, help=f"rows of {NUM_METRICS} metrics (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way (default %(default)s)")
    parser.add_argument("--format", choices=FORMATS, action="append", help="only this one (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def run_way(way: str, path: Path) -> dict[str, float]:
    """Seconds, rows and peak memory of one way in this process. What is loaded late is loaded before the clock."""
    run: dict[str, Callable[[Path], int]] = {"whole": run_whole, "reader": run_reader, "theirs": run_theirs}
    warm_up(path)
    started_at = time.perf_counter()
    num_rows = run[way](path)
    seconds = time.perf_counter() - started_at
    return {"seconds": seconds, "rows": num_rows, "peak_mib": peak_bytes() / MIB}


def warm_up(path: Path) -> None:
    if path.suffix == ".parquet":
        importlib.import_module("pyarrow.parquet")
    with path.open("rb") as file:
        while file.read(MIB):
            pass


def run_whole(path: Path) -> int:
    with tempfile.TemporaryDirectory(dir=path.parent) as work_dir:
        return ingest([path], Path(work_dir), DataConfig(), lambda _: None).dataset.num_rows


def run_reader(path: Path) -> int:
    limits = DataConfig()
    with Source(path, limits) as source:
        reader = open_reader(source, limits, path.parent)
        metric_names, _ = choose_metrics(reader.columns, limits)
        num_rows = sum(map(len, reader.rows(metric_names, Tally())))
        source.finish()
    return num_rows


def run_theirs(path: Path) -> int:
    if path.suffix == ".csv":
        return len(pd.read_csv(path, dtype=np.float64))
    if path.suffix == ".jsonl":
        return len(pd.read_json(path, lines=True))
    import pyarrow.parquet  # noqa: PLC0415  (as above)

    return int(pyarrow.parquet.read_table(path, use_threads=False).num_rows)


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """All rounds of all ways and formats; ratios are of medians."""
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as directory:
        for kind in arguments.format or FORMATS:
            path = Path(directory) / f"rows.{kind}"
            write_file(path, arguments.rows)
            results[kind] = measure_file(path, arguments.rounds)
            path.unlink()
    return {
        "formats": results,
        "setting": {"rows": arguments.rows, "metrics": NUM_METRICS, "rounds": arguments.rounds},
        "machine": {
            "processor": platform.machine(),
            "num_cpus": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "pandas": pd.__version__,
        },
    }


def measure_file(path: Path, rounds: int) -> dict[str, object]:
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, "--file", str(path)]
            runs[way].append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    num_bytes = path.stat().st_size
    speeds = {way: num_bytes / 1e6 / statistics.median(run["seconds"] for run in runs[way]) for way in WAYS}
    return {
        "megabytes": num_bytes / 1e6,
        "rows": {way: runs[way][0]["rows"] for way in WAYS},
        "megabytes_per_second": speeds,
        "peak_mib": {way: max(run["peak_mib"] for run in runs[way]) for way in WAYS},
        "ratio": {way: speeds[way] / speeds["theirs"] for way in WAYS[:2]},
    }


def write_file(path: Path, num_rows: int) -> None:
    """Seeded rows with six digits, as telemetry has them, and a time stamp; Parquet is packed by zstd."""
    generator = np.random.default_rng(SEED)
    names = [f"metric_{index}" for index in range(NUM_METRICS)]
    values = np.round(generator.normal(50.0, 20.0, (num_rows, NUM_METRICS)), 4)
    times = 1_780_000_000 + 15 * np.arange(num_rows)
    if path.suffix == ".parquet":
        import pyarrow as pa  # noqa: PLC0415  (it is optional)
        import pyarrow.parquet  # noqa: PLC0415

        columns = {"time": times, **dict(zip(names, values.T, strict=True))}
        pa.parquet.write_table(pa.table(columns), path, compression="zstd")
        return
    with path.open("w", encoding="ascii") as file:
        if path.suffix == ".csv":
            file.write(",".join(["time", *names]) + "\n")
        for time_, row in zip(times.tolist(), values.tolist(), strict=True):
            if path.suffix == ".csv":
                file.write(",".join(map(repr, (time_, *row))) + "\n")
            else:
                file.write(json.dumps({"time": time_, **dict(zip(names, row, strict=True))}) + "\n")


def table(result: dict[str, object]) -> str:
    lines = [f"{'format':8} {'way':7} {'MB/s':>7} {'of theirs':>10} {'peak MiB':>9}"]
    formats = result["formats"]
    assert isinstance(formats, dict)
    for kind, found in formats.items():
        for way in WAYS:
            ratio = found["ratio"].get(way, 1.0)
            speed, peak = found["megabytes_per_second"][way], found["peak_mib"][way]
            lines.append(f"{kind:8} {way:7} {speed:7.0f} {ratio:10.2f} {peak:9.0f}")
    return "\n".join([*lines, json.dumps(result["setting"]), json.dumps(result["machine"])])


if __name__ == "__main__":
    sys.exit(main())
