"""Every metric of the service: its name, its text, and what the loop says that moves it.

Names are retraind_ + subject + unit; label values come from closed sets and stand at 0 from the start, so that a rate
is right from the first event and nothing that a dataset says can make a new series. The loop's thread writes; scrapes
read from memory only. Values of a running job are removed when it ends: no stale series, no NaN.
"""

import math
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from retraind import __version__, events
from retraind.errors import QUARANTINE_CODES, Disposition
from retraind.printable import printable
from retraind.report import TrainingReport
from retraind.supervisor.intake import Scan
from retraind.supervisor.model_metrics import DEVICES, ModelMetrics
from retraind.supervisor.series import Registry, bounded
from retraind.supervisor.spool import Spool, Usage, count, total

STAGES = ("preflight", "ingest", "import", "train", "evaluate", "publish")
RESULTS = ("published", "duplicate", "rejected", "quarantined")
HOOK_RESULTS = ("ok", "failed", "timeout")
FAULTS = ("spool", "models", "state", "port", "filing", "config", "preflight", "disk", "worker", "low_disk")
DIRECTORIES = ("spool", "models", "state")
DROP_REASONS = ("missing", "non_finite", "not_a_number", "ragged", "malformed", "truncated_tail", "other")
EXIT_REASONS = ("finished", "failed", "interrupted", "crashed", "killed", "silent", "timeout", "protocol")
RETRIES = {
    Disposition.RETRY: "crash",
    Disposition.RETRY_SMALLER: "smaller_batch",
    Disposition.RETRY_FLOAT32: "float32",
    Disposition.DEFER: "machine",
    Disposition.WAIT: "no_reader",
}
# More than a machine has: what a worker gone mad tells must not fill the memory.
MAX_GPUS = 64
GPU_LABELS = ("gpu", "uuid", "name", "pci_address", "driver_version", "kernel_module")
GPU_FACTS = {
    "temperature_celsius": "Temperature of the GPU",
    "memory_free_bytes": "Free memory of the GPU",
    "memory_total_bytes": "Memory of the GPU",
    "pstate": "Performance state of the GPU, 0 is the fastest",
    "pcie_generation": "Generation at which the GPU's link runs, which is lower when it rests",
    "pcie_width": "Lanes of the GPU's link",
}


@dataclass(frozen=True, slots=True)
class Space:
    """What a process without privileges can still write to a filesystem, and its size in all; in bytes."""

    free: int
    size: int


class Metrics:
    """The metrics as the loop speaks of them; `render` is what a scrape gets."""

    def __init__(self) -> None:
        make = Registry()
        self.registry, self.render = make.registry, make.render
        self._service_metrics(make)
        self._spool_metrics(make)
        self._job_metrics(make)
        self._training_metrics(make)
        self._model_metrics(make)
        self._num_events_seen = 0
        self._num_bad_records_seen = 0

    def _service_metrics(self, make: Registry) -> None:
        make.info("build_info", "Version of the service.", version=__version__, python=platform.python_version())
        self._ready = make.gauge("ready", "1 when spool, state, models directory and port are usable.")
        self._fault = make.gauge("fault", "1 while this fault of the machine is being waited out.", {"fault": FAULTS})
        self._reload_success = make.gauge("config_last_reload_successful", "1 when the last reload was accepted.")
        self._reload_success.set(1)
        self._reload_at = make.gauge(
            "config_last_reload_success_timestamp_seconds", "When a configuration was last accepted."
        )
        self._reload_at.set_to_current_time()
        self._web_config_success = make.gauge(
            "web_config_last_load_successful", "0 while the web configuration on disk can not be used."
        )
        self._web_config_success.set(1)
        self._bad_records = make.counter("bad_records", "Job records that could not be read and were put aside.")
        self._disk_free = make.changing(
            "disk_free_bytes", "What the service can still write to the filesystem of a directory.", "directory"
        )
        self._disk_size = make.changing("disk_size_bytes", "Size of the filesystem of a directory.", "directory")

    def _spool_metrics(self, make: Registry) -> None:
        states = ("incoming_settling", "incoming_ready", "incoming_refused", "active", "done", "quarantine")
        self._spool_files = make.gauge("spool_files", "Files in the spool by state.", {"state": states})
        self._spool_bytes = make.gauge("spool_bytes", "Bytes in the spool by state.", {"state": states})
        self._spool_oldest = make.changing(
            "spool_oldest_file_timestamp_seconds",
            "Modification time of the oldest file by state; absent when there is none.",
            "state",
        )
        self._stale_temporaries = make.gauge(
            "spool_stale_temporary_files", "Temporary names in incoming/ older than 36 hours."
        )
        self._done_removed_files = make.counter("done_removed_files", "Files that the limits of done/ removed.")
        self._done_removed_bytes = make.counter("done_removed_bytes", "Bytes that the limits of done/ removed.")
        self._scans = make.counter("scans", "Scans of incoming/.")
        self._watch_events = make.counter("watch_events", "inotify events on incoming/.")
        self._watch_mode = make.gauge(
            "watch_mode", "1 for the way in which incoming/ is watched.", {"mode": ("inotify", "poll")}
        )
        self._watch_healthy = make.gauge(
            "watch_healthy", "1 when inotify watches incoming/, 0 while the scan alone does."
        )

    def _job_metrics(self, make: Registry) -> None:
        self._queue_held = make.gauge("queue_held", "1 while an operator holds the whole queue.")
        self._jobs_held = make.gauge("jobs_held", "Open jobs that an operator holds one by one.")
        self._jobs = make.counter("jobs", "Ended jobs by result.", {"result": RESULTS})
        codes = (*QUARANTINE_CODES, "other")
        self._quarantined = make.counter("quarantined", "Quarantined datasets by code.", {"code": codes})
        retries = tuple(RETRIES.values())
        self._retries = make.counter("job_retries", "Attempts that are to be repeated, by cause.", {"cause": retries})
        self._checkpoints = make.counter("job_checkpoints", "States of training that were kept to go on from.")
        self._resumes = make.counter("job_resumes", "Attempts that went on from a checkpoint.")
        self._job_seconds = make.histogram("job_duration_seconds", "From the claim of a dataset to its end.")
        self._stage_seconds = make.histogram(
            "stage_duration_seconds", "Duration of completed stages.", {"stage": STAGES}
        )

    def _training_metrics(self, make: Registry) -> None:
        self._checks = make.changing(
            "preflight_check", "1 for what the last preflight before a job said of each check.", "check", "status"
        )
        self._fallback = make.gauge(
            "preflight_cpu_fallback", "1 when the last preflight sent a job to the CPU although there is a GPU."
        )
        self._gpu_info = make.changing("gpu_info", "1 for each GPU that the last preflight found.", *GPU_LABELS)
        self._gpus = {
            fact: make.changing(f"gpu_{fact}", f"{text}, at the last preflight; absent when it is not told.", "gpu")
            for fact, text in GPU_FACTS.items()
        }
        self.checked(events.Checked(checks=[]))
        self._rows_used = make.counter("rows_used", "Rows that were used for training.")
        self._rows_dropped = make.counter("rows_dropped", "Rows that were not used.", {"reason": DROP_REASONS})
        self._steps = make.counter("steps", "Training steps of finished attempts, those that were skipped included.")
        self._skipped_steps = make.counter("skipped_steps", "Steps skipped because mixed precision overflowed.")
        self._exits = make.counter("worker_exits", "Ended workers by reason.", {"reason": EXIT_REASONS})
        self._peak = make.gauge("worker_peak_memory_bytes", "Greatest resident size of the last worker that finished.")
        self._unknown_events = make.counter("unknown_events", "Events from workers that were not understood.")
        self._worker_ready = make.gauge("worker_ready", "1 while a worker waits for the next job, imports done.")
        self._ready_lost = make.counter("worker_ready_lost", "Workers kept ready that were gone before they had a job.")
        self._active = make.gauge("job_active", "1 while a worker runs.")
        self._device = make.gauge("job_device", "1 for the device of the running job.", {"device": DEVICES})
        self._current = make.optional(
            "job",
            {
                "epoch": "Running epoch; absent when no job trains.",
                "epochs": "Epochs to run; absent when no job trains.",
                "rows_per_second": "Training speed; absent when no job trains.",
                "loss": "Running mean of the training loss; absent when no job trains.",
            },
        )

    def _model_metrics(self, make: Registry) -> None:
        self._publish_failures = make.counter("publish_failures", "Publications that failed and are tried again.")
        self._hook_runs = make.counter(
            "publish_hook_runs", "Runs of publish.hook that ended, by result.", {"result": HOOK_RESULTS}
        )
        self._rollbacks = make.counter("rollbacks", "Times that an older version was seen to be made live.")
        model = ModelMetrics(make)
        self.published, self.drift_seen = model.published, model.drift_seen
        self._last = make.optional("job", {"last_success_timestamp_seconds": "When a job last ended published."})

    # What the loop tells, in the order of a service's life.

    def ready(self, is_ready: bool) -> None:
        self._ready.set(is_ready)

    def fault(self, name: str, *, on: bool) -> None:
        self._fault.labels(name).set(on)

    def config_reloaded(self, *, success: bool) -> None:
        self._reload_success.set(success)
        if success:
            self._reload_at.set_to_current_time()

    def web_config_loaded(self, *, success: bool) -> None:
        """Told by the endpoint's own threads, unlike the rest."""
        self._web_config_success.set(success)

    def bad_records(self, total: int) -> None:
        """Takes the count since the start."""
        self._bad_records.inc(max(0, total - self._num_bad_records_seen))
        self._num_bad_records_seen = total

    def scanned(self, scan: Scan, spool: Spool, watch_mode: str, num_events: int) -> None:
        """One look at the spool: `num_events` counts since the start."""
        self._scans.inc()
        self._watch_events.inc(num_events - self._num_events_seen)
        self._num_events_seen = num_events
        for mode in ("inotify", "poll"):
            self._watch_mode.labels(mode).set(mode == watch_mode)
        self._watch_healthy.set(watch_mode == "inotify")
        self._stale_temporaries.set(scan.num_stale_temporaries)
        usages = {state: spool.usage(path) for state, path in (("done", spool.done), ("quarantine", spool.quarantined))}
        usages["active"] = total([count(path) for path in spool.active.iterdir()])
        for state, entries in (("settling", scan.settling), ("ready", scan.ready), ("refused", scan.refused)):
            first_ns = min((entry.mtime_ns for entry in entries), default=None)
            size = sum(entry.size for entry in entries)
            usages[f"incoming_{state}"] = Usage(len(entries), size, None if first_ns is None else first_ns / 1e9)
        for state, usage in usages.items():
            self._spool_files.labels(state).set(usage.num_files)
            self._spool_bytes.labels(state).set(usage.num_bytes)
        self._spool_oldest.values = {(state,): u.oldest for state, u in usages.items() if u.oldest is not None}

    def disks_seen(self, spaces: Mapping[str, Space]) -> None:
        """What was found. A filesystem that could not be asked has no series rather than an old value."""
        known = [name for name in DIRECTORIES if name in spaces]
        self._disk_free.values = {(name,): float(spaces[name].free) for name in known}
        self._disk_size.values = {(name,): float(spaces[name].size) for name in known}

    def done_removed(self, num_files: int, num_bytes: int) -> None:
        self._done_removed_files.inc(num_files)
        self._done_removed_bytes.inc(num_bytes)

    def held(self, *, queue: bool, num_jobs: int) -> None:
        self._queue_held.set(queue)
        self._jobs_held.set(num_jobs)

    def worker_ready(self, is_ready: bool) -> None:
        self._worker_ready.set(is_ready)

    def ready_worker_lost(self) -> None:
        self._ready_lost.inc()

    def started(self) -> None:
        self._active.set(1)

    def stage_ended(self, stage: str, seconds: float) -> None:
        if stage in STAGES:
            self._stage_seconds.labels(stage).observe(seconds)

    def checked(self, found: events.Checked) -> None:
        """One preflight. What is in no table makes no series, nor does a figure that is not told."""
        said = {check.name: check.status for check in found.checks}
        pairs = product(events.CHECKS, events.CHECK_STATUSES)
        self._checks.values = {(name, status): float(said.get(name) == status) for name, status in pairs}
        self._fallback.set(bool(found.fallback))
        gpus = {str(index): gpu for index, gpu in enumerate(found.gpus[:MAX_GPUS])}
        self._gpu_info.values = {
            (name, *(printable(getattr(gpu, label)) for label in GPU_LABELS[1:])): 1.0 for name, gpu in gpus.items()
        }
        for fact, series in self._gpus.items():
            told = {name: getattr(gpu, fact) for name, gpu in gpus.items()}
            series.values = {(name,): bounded(value) for name, value in told.items() if value is not None}

    def rows_seen(self, num_used: int, num_dropped: Mapping[str, int]) -> None:
        self._rows_used.inc(bounded(num_used))
        for reason, number in num_dropped.items():
            self._rows_dropped.labels(reason if reason in DROP_REASONS else "other").inc(bounded(number))

    def progress(self, event: events.Progress) -> None:
        values = {"epoch": event.epoch, "epochs": event.epochs, "rows_per_second": event.rows_per_second}
        if event.loss is not None and math.isfinite(event.loss):
            values["loss"] = event.loss
        self._current.values = {name: bounded(value) for name, value in values.items()}
        for device in DEVICES:
            self._device.labels(device).set(device == event.device.partition(":")[0])

    def worker_ended(self, reason: str, peak_bytes: int) -> None:
        """Counts the exit, and takes away what was true of the running job only."""
        self._exits.labels(reason).inc()
        if peak_bytes:
            self._peak.set(bounded(peak_bytes))
        self._active.set(0)
        for device in DEVICES:
            self._device.labels(device).set(0)
        self._current.values = {}

    def trained(self, training: TrainingReport) -> None:
        """An attempt that came to its end."""
        self._steps.inc(bounded(training.num_steps))
        self._skipped_steps.inc(bounded(training.num_skipped_steps))

    def checkpointed(self) -> None:
        self._checkpoints.inc()

    def resumed(self) -> None:
        self._resumes.inc()

    def unknown_events(self, number: int) -> None:
        self._unknown_events.inc(number)

    def retried(self, disposition: Disposition) -> None:
        if disposition in RETRIES:
            self._retries.labels(RETRIES[disposition]).inc()

    def publish_failed(self) -> None:
        self._publish_failures.inc()

    def hook_ran(self, result: str) -> None:
        self._hook_runs.labels(result).inc()

    def rolled_back(self) -> None:
        self._rollbacks.inc()

    def job_ended(self, result: str, code: str, seconds: float) -> None:
        self._jobs.labels(result).inc()
        self._job_seconds.observe(seconds)
        if result == "published":
            self._last.values = {"last_success_timestamp_seconds": time.time()}
        if result == "quarantined":
            self._quarantined.labels(code if code in QUARANTINE_CODES else "other").inc()
