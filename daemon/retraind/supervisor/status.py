"""What the service is doing, in words: the line in `systemctl status` and the file behind `retraind status`.

Pure text from facts, and one small file that promises nothing after a power cut. No clock, no state of its own.
"""

from datetime import datetime
from pathlib import Path

import msgspec

from retraind import events, fsio, typed_json
from retraind.report import Gpu

STATUS_FILE = "status.json"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One line and the numbers in it.

    `state` is starting, idle, settling, working, held, deferred, degraded or stopping.
    """

    state: str
    text: str
    updated_at: datetime
    job: str = ""
    num_ready: int = 0
    num_settling: int = 0
    live_version: str = ""
    is_worker_ready: bool = False
    faults: dict[str, str] = {}
    gpus: list[Gpu] = []  # as the last preflight found them
    cpu_fallback: str = ""  # why the last job was sent to the CPU although there is a GPU


def write(state_dir: Path, status: Status) -> None:
    """Replaces the status file; a full disk is no reason to stop."""
    fsio.write_volatile(state_dir / STATUS_FILE, msgspec.json.encode(status) + b"\n")


def read(state_dir: Path) -> Status | None:
    """The last status that a service wrote, or None."""
    try:
        return typed_json.decode((state_dir / STATUS_FILE).read_bytes(), Status)
    except (OSError, typed_json.Malformed):
        return None


def describe_work(name: str, stage: str, event: events.Event | None) -> str:
    """What the worker is at: `training node-42.csv: epoch 3/5, loss 0.7413, 512k rows/s, 8 s left`."""
    match event:
        case events.Progress():
            loss = f"loss {event.loss:.4f}, " if event.loss is not None else ""
            speed = f"{_short(event.rows_per_second)} rows/s, " if event.rows_per_second else ""
            return (
                f"training {name}: epoch {event.epoch}/{event.epochs}, {loss}{speed}{duration(event.seconds_left)} left"
            )
        case events.Resumed() | events.Checkpointed():
            return f"training {name}: epoch {event.epoch}/{event.epochs}"
        case events.Heartbeat(done_share=share) if share is not None:
            return f"{_VERBS.get(stage, stage)} {name}: {share:.0%}"
        case _:
            return f"{_VERBS.get(stage, 'starting on')} {name}"


_VERBS = {
    "preflight": "checking the machine for",
    "ingest": "reading",
    "import": "loading torch for",
    "train": "training",
    "evaluate": "evaluating the model of",
}


def waiting(num_ready: int) -> str:
    """The queue as a tail of the line; empty when there is none."""
    return f"; {num_ready} file{'s' * (num_ready != 1)} waiting" if num_ready else ""


def next_try(pause_seconds: float) -> str:
    """The pause as a tail of the line; empty when it is over."""
    return f"; next try in {duration(pause_seconds)}" if pause_seconds > 0 else ""


def duration(seconds: float) -> str:
    """`8 s`, `12 min`, `3 h`: as precise as a person wants it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _short(number: float) -> str:
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if number < limit:
            return f"{number / divisor:.3g}{unit}"
    return f"{number / 1e9:.3g}G"
