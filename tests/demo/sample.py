"""A realistic sample of server telemetry, made by code: 32 host metrics at one row a minute.

Daily and weekly rhythm drive a load that most metrics follow, each with its own lag, gain and noise; bursts (batch
jobs, backups) come at random, counters grow, some metrics hardly move. A few cells are missing, as scrapes are. The
same seed gives the same bytes.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

METRICS = [
    "cpu_user_ratio", "cpu_system_ratio", "cpu_iowait_ratio", "cpu_steal_ratio", "load1", "load5", "load15",
    "procs_running", "procs_blocked", "context_switches_per_second", "interrupts_per_second", "memory_used_ratio",
    "memory_cached_ratio", "memory_dirty_bytes", "swap_used_ratio", "disk_read_bytes_per_second",
    "disk_written_bytes_per_second", "disk_reads_per_second", "disk_writes_per_second", "disk_busy_ratio",
    "disk_queue_length", "filesystem_used_ratio", "network_received_bytes_per_second",
    "network_sent_bytes_per_second", "network_packets_per_second", "network_drops_per_second", "tcp_connections",
    "tcp_retransmits_per_second", "gpu_busy_ratio", "gpu_memory_used_ratio", "gpu_power_watts",
    "gpu_temperature_celsius",
]  # fmt: skip
_DAY = 1440


def rows(num_rows: int, seed: int) -> NDArray[np.float64]:
    """num_rows x 32 values, finite, in the units that the names say."""
    rng = np.random.default_rng(seed)
    minute = np.arange(num_rows)
    day = 0.5 - 0.5 * np.cos(2 * np.pi * (minute % _DAY) / _DAY)
    weekday = np.where((minute // _DAY) % 7 < 5, 1.0, 0.55)
    load = np.clip(0.15 + 0.55 * day * weekday + _walk(rng, num_rows, 0.08) + _bursts(rng, num_rows, 0.3), 0.02, 1.0)
    disk = np.clip(0.1 + 0.3 * load + _bursts(rng, num_rows, 0.5) + _walk(rng, num_rows, 0.05), 0.01, 1.0)
    network = np.clip(0.8 * load + _walk(rng, num_rows, 0.06), 0.01, 1.2)
    gpu = np.clip(np.where(_walk(rng, num_rows, 0.5) > 0, 0.85, 0.05) + rng.normal(0, 0.04, num_rows), 0, 1)
    memory = np.clip(0.35 + 0.3 * _smooth(load, 60) + _walk(rng, num_rows, 0.02), 0.05, 0.97)

    def noisy(signal: NDArray[np.float64], gain: float, share: float) -> NDArray[np.float64]:
        return np.abs(gain * signal * (1 + rng.normal(0, share, num_rows)))

    columns = [
        noisy(load, 0.8, 0.05), noisy(load, 0.15, 0.08), noisy(disk, 0.1, 0.2), noisy(load, 0.002, 0.5),
        noisy(load, 16, 0.1), noisy(_smooth(load, 5), 16, 0.03), noisy(_smooth(load, 15), 16, 0.02),
        np.floor(noisy(load, 18, 0.2)), np.floor(noisy(disk, 3, 0.4)), noisy(load + network, 40_000, 0.05),
        noisy(network + disk, 25_000, 0.05), memory, np.clip(0.9 - memory, 0, 1), noisy(disk, 4e8, 0.3),
        np.maximum(0, memory - 0.85) * 2, noisy(disk, 2e8, 0.2), noisy(disk, 3e8, 0.2), noisy(disk, 4_000, 0.15),
        noisy(disk, 9_000, 0.15), np.clip(noisy(disk, 0.95, 0.06), 0, 1), noisy(disk**2, 12, 0.3),
        0.42 + 0.2 * minute / max(num_rows, 1) + rng.normal(0, 1e-4, num_rows), noisy(network, 1.2e8, 0.1),
        noisy(network, 9e7, 0.1), noisy(network, 1.6e5, 0.08), np.floor(noisy(network**4, 6, 0.8)),
        np.floor(noisy(network, 1_800, 0.04)), noisy(network**2, 30, 0.4), gpu,
        np.clip(0.1 + 0.75 * gpu + rng.normal(0, 0.01, num_rows), 0, 1), noisy(0.15 + gpu, 300, 0.03),
        33 + 42 * _smooth(gpu, 10) + rng.normal(0, 0.5, num_rows),
    ]  # fmt: skip
    return np.stack(columns, axis=1)


def with_faults(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], dict[str, tuple[range, str]]]:
    """A copy of a day's rows in which four things go wrong, and for each its rows and the metric that is at fault."""
    values = values.copy()
    at = {name: column for column, name in enumerate(METRICS)}
    values[100:160, at["cpu_steal_ratio"]] += 0.03  # another virtual machine moves in
    values[360:390, at["disk_busy_ratio"]] = values[200:1000, at["disk_busy_ratio"]].min()
    values[700, at["disk_queue_length"]] += 60
    columns = [at["load5"], at["tcp_connections"]]
    values[620:625, columns] = values[620:625, columns[::-1]]
    return values, {
        "level shift": (range(100, 160), "cpu_steal_ratio"),
        "stuck value": (range(360, 390), "disk_busy_ratio"),
        "spike": (range(700, 701), "disk_queue_length"),
        "swapped columns": (range(620, 625), "load5"),
    }


def write_csv(path: Path, values: NDArray[np.float64], first_minute: int = 0, num_gaps: int = 40) -> None:
    """Writes rows with a header, a time stamp and a host column, `num_gaps` of them with an empty cell."""
    num_rows = len(values)
    rng = np.random.default_rng(8)
    gaps = dict(
        zip(rng.choice(num_rows, num_gaps, replace=False), rng.integers(0, len(METRICS), num_gaps), strict=True)
    )
    start = datetime(2026, 1, 5, tzinfo=UTC) + timedelta(minutes=first_minute)
    with path.open("w", encoding="utf-8") as file:
        file.write(",".join(["timestamp", "host", *METRICS]) + "\n")
        for number, row in enumerate(values):
            cells = [f"{value:.6g}" for value in row]
            if number in gaps:
                cells[gaps[number]] = ""
            when = (start + timedelta(minutes=number)).strftime("%Y-%m-%dT%H:%M:%SZ")
            file.write(f"{when},node-42,{','.join(cells)}\n")


def _walk(rng: np.random.Generator, num_rows: int, size: float) -> NDArray[np.float64]:
    """A slow wander around zero with standard deviation `size`."""
    smooth = _smooth(rng.normal(0, 1, num_rows), 90)
    return size * smooth / (smooth.std() + 1e-12)


def _bursts(rng: np.random.Generator, num_rows: int, height: float) -> NDArray[np.float64]:
    """About one burst in eight hours, 5 to 40 minutes long."""
    signal = np.zeros(num_rows)
    for start in rng.integers(0, num_rows, num_rows // 480 + 1):
        signal[start : start + rng.integers(5, 40)] = height * rng.uniform(0.5, 1.0)
    return signal


def _smooth(signal: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """The mean of the last `width` values."""
    total = np.cumsum(np.concatenate([np.full(width, signal[0]), signal]))
    return (total[width:] - total[:-width]) / width
