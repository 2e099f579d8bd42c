"""From a drop to a publication: a small and a large file through the running service, with and without a ready worker.

Two services run side by side, one that keeps a worker ready and one that starts a worker for each job; files are
dropped by turns, so that a busy machine slows both. The time is from the rename into incoming/ to the moment at which
the known path leads to the new version, less the quiet window, which is the operator's choice. Where it went is told
by the service's own histogram of stages; "other" is what lies outside them: the scan, the claim, the worker's start.

    python benchmarks/drop_to_publish.py [--small-rounds 5] [--large-rounds 3] [--rows 500000] [--epochs 5] [--json]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from train_speed import MIB, NUM_METRICS, machine, write_csv

from retraind.config import IntakeConfig

QUIET_SECONDS = IntakeConfig().quiet_seconds
SMALL_ROWS = 300
# A drop that is not published by then never will be.
DEADLINE_SECONDS = 300.0
_POLL_SECONDS = 0.002
_SLOW_POLL_SECONDS = 0.1  # where nothing is timed: a scrape costs more than a look at a link
_NUM_JOBS = "retraind_job_duration_seconds_count"


class Service:
    """`retraind serve` below a directory, with the defaults but for where it lives."""

    def __init__(self, root: Path, keep_ready_seconds: float, epochs: int | None) -> None:
        self.root, self.is_kept_ready = root, keep_ready_seconds > 0
        config = {
            "device": "cpu",
            "spool": {"dir": "spool"},
            "models": {"dir": "models"},
            "state": {"dir": "state"},
            "metrics": {"listen": "127.0.0.1:0"},
            "worker": {"keep_ready_seconds": keep_ready_seconds},
            "training": {} if epochs is None else {"epochs": epochs},
        }
        root.mkdir()
        (root / "retraind.yaml").write_bytes(msgspec.json.encode(config))  # JSON is YAML
        self._link = root / "models" / "telemetry_autoencoder" / "current"
        self._log = root / "log"

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "retraind", "serve", "--config", str(self.root / "retraind.yaml")]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        self._wait_for(lambda: "ready: watching" in self._log.read_text())
        self._url = re.findall(r"metrics at (http://\S+)", self._log.read_text())[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def _wait_for(self, probe: Callable[[], object], pause_seconds: float = _POLL_SECONDS) -> None:
        until = time.monotonic() + DEADLINE_SECONDS
        while not probe():
            if time.monotonic() > until or self._process.poll() is not None:
                raise SystemExit(f"the service did not come so far:\n{self._log.read_text()}")
            time.sleep(pause_seconds)

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name and labels."""
        with urllib.request.urlopen(self._url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def run(self, file: Path) -> dict[str, float]:
        """Drops the file, which must lie on the same filesystem; the seconds of the job, and the worker's memory."""
        if self.is_kept_ready:
            self._wait_for(lambda: self.metrics()["retraind_worker_ready"] == 1, _SLOW_POLL_SECONDS)
        before, live = self.metrics(), self._live()
        spent = self._spent() + sum(_cpu_seconds(pid)[0] for pid in self._workers())
        dropped_at = time.perf_counter()
        file.rename(self.root / "spool" / "incoming" / file.name)
        self._wait_for(lambda: self._live() != live)
        seconds = time.perf_counter() - dropped_at - QUIET_SECONDS
        self._wait_for((self.root / "spool" / "done" / file.name).exists)
        self._wait_for(lambda: self.metrics()[_NUM_JOBS] > before[_NUM_JOBS], _SLOW_POLL_SECONDS)
        after = self.metrics()
        name = r'retraind_stage_duration_seconds_sum{stage="(\w+)"}'
        stages = {found[1]: after[key] - before[key] for key in after if (found := re.fullmatch(name, key))}
        peak = after["retraind_worker_peak_memory_bytes"] / MIB
        # What a worker spent before it had a job is not the job's.
        self._wait_for(lambda: self._spent() > spent, _SLOW_POLL_SECONDS)
        cpu_seconds = self._spent() - spent
        outside = seconds - sum(stages.values())
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": peak, **stages, "other": outside}

    def _spent(self) -> float:
        """Processor seconds of the workers that have ended."""
        return _cpu_seconds(self._process.pid)[1]

    def _workers(self) -> list[int]:
        pid = self._process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def _live(self) -> str:
        return str(self._link.readlink()) if self._link.is_symlink() else ""


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """Of the process, and of its children that were waited for: proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    utime, stime, cutime, cstime = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15])
    return utime + stime, cutime + cstime


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, object]:
    """Both services, both files, by turns."""
    sizes = {"small": (SMALL_ROWS, arguments.small_rounds), "large": (arguments.rows, arguments.large_rounds)}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    megabytes = {}
    for size, (num_rows, num_rounds) in sizes.items():
        rows = directory / f"{size}.csv"
        write_csv(rows, num_rows)
        megabytes[size] = rows.stat().st_size / 1e6
        # A small file is trained on as the defaults say, by steps; the large one for as many epochs as its figure asks.
        epochs = None if size == "small" else arguments.epochs
        with (
            Service(directory / f"{size}-ready", 600.0, epochs) as ready,
            Service(directory / f"{size}-cold", 0.0, epochs) as cold,
        ):
            services = {"ready": ready, "cold": cold}
            found[size] = {name: [] for name in services}
            for number in range(num_rounds):
                for name, service in services.items():
                    # One row more each time: the same content again would be a duplicate.
                    file = directory / f"{size}-{number}.csv"
                    row = ",".join([str(number + 1)] * NUM_METRICS)
                    file.write_bytes(rows.read_bytes() + f"{row}\n".encode())
                    found[size][name].append(service.run(file))
    return {
        "setting": {
            "small_rows": SMALL_ROWS,
            "large_rows": arguments.rows,
            "epochs": arguments.epochs,
            "metrics": NUM_METRICS,
        },
        "quiet_seconds": QUIET_SECONDS,
        "megabytes": megabytes,
        **{size: {name: summary(rounds) for name, rounds in by_service.items()} for size, by_service in found.items()},
        "machine": machine() | {"load": os.getloadavg()[0]},
    }


def summary(rounds: list[dict[str, float]]) -> dict[str, object]:
    """Medians, and the range of the whole."""
    seconds = [one["seconds"] for one in rounds]
    stages = [key for key in rounds[0] if key not in ("seconds", "cpu_seconds", "peak_mib")]
    return {
        "rounds": len(rounds),
        "seconds": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "cpu_seconds": statistics.median(one["cpu_seconds"] for one in rounds),
        "peak_mib": max(one["peak_mib"] for one in rounds),
        "stages": {stage: statistics.median(one[stage] for one in rounds) for stage in stages},
    }


def print_table(result: dict[str, object]) -> None:
    for size in ("small", "large"):
        by_service = result[size]
        assert isinstance(by_service, dict)
        for name, row in by_service.items():
            stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in row["stages"].items())
            print(
                f"{size:6}{name:6}{row['seconds']:8.2f} s ({row['seconds_min']:.2f}-{row['seconds_max']:.2f}) "
                f"cpu {row['cpu_seconds']:.2f} s {row['peak_mib']:5.0f} MiB   {stages}"
            )
    print(f"beyond the quiet window of {result['quiet_seconds']} s   {result['setting']}   {result['machine']}")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small-rounds", type=int, default=5, help="drops of the small file (default %(default)s)")
    parser.add_argument("--large-rounds", type=int, default=3, help="drops of the large file (default %(default)s)")
    parser.add_argument("--rows", type=int, default=500_000, help="rows of the large file (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs on the large file (default %(default)s)")
    parser.add_argument("--dir", type=Path, help="where the files lie meanwhile (default: the temporary directory)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser.parse_args(words)


def main() -> int:
    arguments = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        result = measure(arguments, Path(name))
    if arguments.json:
        print(json.dumps(result))
    else:
        print_table(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
