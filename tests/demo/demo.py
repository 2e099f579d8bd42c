"""`make demo`: the main job, end to end, on folders below ./demo.

Starts the real service, drops a file as a producer would, shows what `systemctl status` would show, then reads the
model as a consumer would and scores a day in which things go wrong. Needs no GPU, no systemd, no root. Ends 0 only when
each step did what it should.
"""

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import torch
from guide import TelemetryAutoencoder
from numpy.typing import NDArray
from sample import METRICS, rows, with_faults, write_csv

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo"
NUM_ROWS = 120_000
DAY = 1440
DEADLINE_SECONDS = 300
CONFIG = """\
spool: {dir: spool}
models: {dir: models}
state: {dir: state}
metrics: {listen: "127.0.0.1:0"}
intake: {quiet_seconds: 0.5, rescan_seconds: 2}
training: {epochs: 50}  # the default is over before one can look
"""
SHOWN = ("retraind_jobs_total", "retraind_rows", "retraind_model", "retraind_ready", "retraind_worker_exits")


def say(text: str) -> None:
    """One step of the story."""
    print(f"\033[1m==> {text}\033[0m" if sys.stdout.isatty() else f"==> {text}", flush=True)


def main() -> int:
    shutil.rmtree(DEMO, ignore_errors=True)
    DEMO.mkdir()
    (DEMO / "retraind.yaml").write_text(CONFIG)
    say(f"generating {NUM_ROWS:,} rows of telemetry, {len(METRICS)} metrics: demo/node-42.csv")
    telemetry = rows(NUM_ROWS + DAY, seed=7)
    write_csv(DEMO / "node-42.csv", telemetry[:NUM_ROWS])
    say("starting the service: retraind serve --config demo/retraind.yaml (its log: demo/service.log)")
    with (DEMO / "service.log").open("w") as log:
        service = subprocess.Popen(
            [sys.executable, "-m", "retraind", "serve", "--config", str(DEMO / "retraind.yaml")],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        show_job(service)
        show_metrics()
        use_model()
        find_faults(telemetry[NUM_ROWS:])
        say("stopping the service: SIGTERM")
        service.send_signal(signal.SIGTERM)
        status = service.wait(30)
    finally:
        service.kill()
        service.wait()
    say(f"the service ended with exit status {status}")
    return status


def show_job(service: subprocess.Popen[bytes]) -> None:
    """Drops the file and follows the status line until the weights are published."""
    wait_for(service, lambda: (DEMO / "spool" / "incoming").is_dir() and status_text().startswith("idle"))
    say("dropping the file as a producer does: write beside the spool, then mv into spool/incoming")
    os.rename(DEMO / "node-42.csv", DEMO / "spool" / "incoming" / "node-42.csv")
    seen = ""

    def is_published() -> bool:
        nonlocal seen
        text = status_text()
        if text != seen:
            seen = text
            print(f"    {text}", flush=True)
        return (DEMO / "models" / "telemetry_autoencoder.pt").exists() and text.startswith("idle")

    wait_for(service, is_published)
    wait_for(service, lambda: (DEMO / "spool" / "done" / "node-42.csv").exists())


def show_metrics() -> None:
    """Scrapes the endpoint as Prometheus does."""
    url = (DEMO / "service.log").read_text().split("metrics at ")[1].split()[0]
    say(f"scraping {url}")
    with urllib.request.urlopen(url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    for line in lines:
        if line.startswith(SHOWN) and not line.endswith(" 0.0"):
            print(f"    {line}")


def use_model() -> None:
    """Reads the published model as its consumers do: resolve `current` once, then use that version."""
    version = (DEMO / "models" / "telemetry_autoencoder" / "current").resolve()
    manifest = json.loads((version / "manifest.json").read_text())
    say("loading the weights with the class of the guide")
    print(f"    weights   demo/{(DEMO / 'models' / 'telemetry_autoencoder.pt').relative_to(DEMO)}")
    print(f"    version   {version.name}, sha256 {manifest['weights_sha256'][:16]}...")
    model = TelemetryAutoencoder(manifest["shape"]["input_dim"], manifest["shape"]["latent_dim"])
    model.load_state_dict(torch.load(version / "weights.pt", weights_only=True))
    model.eval()
    dataset, training, evaluation = manifest["dataset"], manifest["training"], manifest["evaluation"]
    print(f"    rows      {dataset['num_rows']:,} used, of their cells {dataset['num_missing_cells']} missing")
    print(f"    training  {training['epochs']} epochs on {training['device_name']} ({training['precision']}), "
          f"{training['rows_per_second']:,.0f} rows/s, loss {training['epoch_losses'][-1]:.4f}")  # fmt: skip
    print(f"    held-out  error {evaluation['heldout_loss']:.4f} (predicting the mean: {evaluation['mean_loss']:.4f})")
    scaler, window = manifest["scaler"], manifest["shape"]["window"]
    metric = manifest["metric_names"].index("gpu_temperature_celsius")
    z = (104.0 - scaler["centre"][metric]) / scaler["scale"][metric]
    windows_2WD = torch.zeros(2, window, len(manifest["metric_names"]))  # all at their centres
    windows_2WD[1, -1, metric] = scaler["soft_limit"] * (1 + math.log(z / scaler["soft_limit"]))
    with torch.no_grad():
        x_2F = windows_2WD.flatten(1)
        normal_error, strange_error = ((model(x_2F) - x_2F) ** 2).mean(dim=1).tolist()
    print(f"    error of an average row {normal_error:.3f}, of the same with a GPU at 104 C {strange_error:.3f}")
    if not strange_error > normal_error:
        raise SystemExit("the model does not see the hot GPU")


def find_faults(day: NDArray[np.float64]) -> None:
    """Scores the day after with `retraind score`, and looks for what was done to it."""
    values, faults = with_faults(day)
    write_csv(DEMO / "today.csv", values, first_minute=NUM_ROWS, num_gaps=3)
    command = ["score", "demo/today.csv", "--out", "demo/scores.csv"]
    say(f"scoring the next day, with {len(faults)} faults put in: retraind {' '.join(command)}")
    subprocess.run(
        [sys.executable, "-m", "retraind", *command, "--config", str(DEMO / "retraind.yaml")], cwd=ROOT, check=True
    )
    with (DEMO / "scores.csv").open(newline="") as file:
        scored = list(csv.DictReader(file))
    for kind, (numbers, metric) in faults.items():
        row = max((scored[number] for number in numbers), key=lambda row: float(row["score"] or 0))
        by_error, by_z = ([row[f"{what}_metric_{place}"] for place in (1, 2, 3)] for what in ("error", "z"))
        print(f"    {row['time']}  score {float(row['score']):6.1f}  {kind} of {metric}")
        print(f"        by error  {', '.join(by_error)}")
        print(f"        by z      {', '.join(by_z)}")
        if row["is_anomaly"] != "true" or metric not in by_error + by_z:
            raise SystemExit(f"the {kind} of {metric} was not found")
    touched = sum(row["is_anomaly"] == "true" for row in scored)
    print(f"    {touched} of {len(scored):,} rows are above 1")


def status_text() -> str:
    """The line that `systemctl status` would show."""
    try:
        return str(json.loads((DEMO / "state" / "status.json").read_text())["text"])
    except FileNotFoundError:
        return ""


def wait_for(service: subprocess.Popen[bytes], condition) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if service.poll() is not None or time.monotonic() > until:
            print((DEMO / "service.log").read_text(), file=sys.stderr)
            raise SystemExit("the service did not do it: its log is above")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
