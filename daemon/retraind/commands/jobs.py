"""`retraind jobs`, `status` and `requeue`: what became of each dataset, what the service does, and another try."""

import os
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from retraind.commands import screen
from retraind.config import Config
from retraind.errors import HostError, UsageError
from retraind.job import FINAL_STATES, Job
from retraind.locks import is_locked
from retraind.supervisor import holds
from retraind.supervisor import status as status_file
from retraind.supervisor.account import marked_gpus
from retraind.supervisor.ledger import read_jobs
from retraind.supervisor.spool import Spool

# A screen or two.
_SHOWN = 50


def require_readable(path: Path) -> None:
    """A directory that is closed to this user must not look like an empty one."""
    if path.exists() and not os.access(path, os.R_OK | os.X_OK):
        raise HostError(
            "unreadable", f"{path} is closed to this user", remedy="run it as root or as the service's user"
        )


def jobs(config: Config, *, as_json: bool, limit: int | None) -> int:
    """Lists the newest jobs, newest last."""
    require_readable(config.state.dir)
    require_readable(config.state.dir / "jobs")
    found, held = read_jobs(config.state.dir), holds.read(config.state.dir)
    if as_json:
        shown = found if limit is None else found[-limit:]
        screen.print_json([msgspec.to_builtins(job) | {"held": job.id in held.jobs} for job in shown])
        return 0
    if held.queue:
        screen.print_line("the queue is held: nothing is started until `retraind release --all`")
    limit = limit or _SHOWN
    if not found:
        screen.print_line(f"no jobs yet: drop a file into {config.spool.dir / 'incoming'}")
        return 0
    if len(found) > limit:
        screen.print_line(f"the newest {limit} of {len(found)} jobs (--limit shows more)")
    screen.print_table(
        ("JOB", "FILE", "STATE", "TRIES", "CHANGED", "RESULT"),
        [
            (
                job.id,
                job.name,
                _state(job, held),
                job.attempts,
                _ago(job.updated_at),
                _result(job),
            )
            for job in found[-limit:]
        ],
    )
    return 0


def _state(job: Job, held: holds.Held) -> str:
    is_held = job.id in held.jobs and job.state not in FINAL_STATES
    return f"{job.state.value}{', held' * is_held}"


def _result(job: Job) -> str:
    return job.version or (str(job.reason) if job.reason else "")


def _ago(when: datetime) -> str:
    return f"{status_file.duration(max(0.0, (datetime.now(UTC) - when).total_seconds()))} ago"


def status(config: Config, *, as_json: bool) -> int:
    """What the service does now; 0 while it runs, 69 when it does not."""
    require_readable(config.state.dir)
    current = status_file.read(config.state.dir)
    running = is_locked(config.state.dir / ".lock")
    if as_json:
        screen.print_json({"running": running, "status": current})
    elif current is None:
        screen.print_line(f"no service has run here yet (state.dir is {config.state.dir})")
    else:
        facts: list[tuple[str, object]] = [
            ("service", "running" if running else f"not running, last seen {_ago(current.updated_at)}"),
            ("doing" if running else "was", current.text),
            ("live version", current.live_version or "none"),
            ("files waiting", current.num_ready),
            ("files settling", current.num_settling),
            ("worker ready", "yes" if current.is_worker_ready else "no"),
            *((f"fault: {name}", text) for name, text in current.faults.items()),
            *marked_gpus(current.gpus),
            *([("on the CPU since", current.cpu_fallback)] if current.cpu_fallback else []),
        ]
        screen.print_facts(facts)
    return 0 if running else HostError.exit_status


def requeue(config: Config, *, job_id: str | None, everything: bool) -> int:
    """Moves datasets from quarantine/ back to incoming/. Raises UsageError for a job that has none there."""
    spool = Spool(config.spool.dir)
    try:
        held = spool.in_quarantine()
    except FileNotFoundError:
        held = {}
    if not everything and job_id not in held:
        known = {job.id: job for job in read_jobs(config.state.dir)}
        job = known.get(job_id or "")
        state = f"is {job.state.value}" if job else "is not known"
        remedy = "`retraind jobs` lists them; only quarantined and rejected jobs can be queued again"
        raise UsageError("not_found", f"job {job_id} {state} and has no file in {spool.quarantined}", remedy=remedy)
    chosen = held if everything else {str(job_id): held[str(job_id)]}
    for found_id, path in chosen.items():
        screen.print_line(f"{found_id}: {spool.requeue(path, found_id)} is back in {spool.incoming}")
    if not chosen:
        screen.print_line(f"nothing in {spool.quarantined}")
    return 0
