"""Every metric of the service, in a registry of its own. The only importer of prometheus_client.

Names are retraind_ + subject + unit; label values come from closed sets and stand at 0 from the start, so that a rate
is right from the first event and nothing that a dataset says can make a new series. The loop's thread writes; scrapes
read from memory only. Values of a running job are removed when it ends: no stale series, no NaN.
"""

import gzip
import math
import platform
import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from retraind import __version__, events
from retraind.errors import QUARANTINE_CODES, Disposition
from retraind.report import Manifest
from retraind.supervisor.intake import Scan
from retraind.supervisor.spool import Spool, Usage, count

STAGES = ("preflight", "ingest", "import", "train", "evaluate", "publish")
RESULTS = ("published", "duplicate", "rejected", "quarantined")
FAULTS = ("spool", "models", "state", "port", "filing", "config", "preflight", "disk", "worker")
DROP_REASONS = ("missing", "non_finite", "not_a_number", "ragged", "malformed", "truncated_tail", "other")
EXIT_REASONS = ("finished", "failed", "interrupted", "crashed", "killed", "silent", "timeout", "protocol")
RETRIES = {
    Disposition.RETRY: "crash",
    Disposition.RETRY_SMALLER: "smaller_batch",
    Disposition.RETRY_FLOAT32: "float32",
    Disposition.DEFER: "machine",
}
# From a file of 300 rows to a day of training.
_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0, 14_400.0, 86_400.0)
# More than any count that is meant: a number of a worker gone mad must end neither the loop nor every later scrape.
_MAX_NUMBER = 2.0**63

disable_created_metrics()  # type: ignore[no-untyped-call]


class _Optional(Collector):
    """Gauges that are there only while they have a value. The dict is replaced whole: a scrape sees one moment."""

    def __init__(self, subject: str, texts: Mapping[str, str]) -> None:
        self._subject, self._texts = subject, texts
        self.values: Mapping[str, float] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        values = self.values
        for name, text in self._texts.items():
            if name in values:
                yield GaugeMetricFamily(f"retraind_{self._subject}_{name}", text, value=values[name])


class _Series(Collector):
    """A gauge of one label whose series come and go. The dict is replaced whole: none is ever seen half made."""

    def __init__(self, name: str, text: str, label: str) -> None:
        self._name, self._text, self._label = f"retraind_{name}", text, label
        self.values: Mapping[str, float] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=(self._label,))
        for label_value, value in self.values.items():
            family.add_metric((label_value,), value)
        yield family


class Metrics:
    """The metrics as the loop speaks of them; `render` is what a scrape gets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._service_metrics()
        self._spool_metrics()
        self._job_metrics()
        self._model_metrics()
        self._num_events_seen = 0
        self._num_bad_records_seen = 0

    def _gauge(self, name: str, text: str, labels: Mapping[str, tuple[str, ...]] | None = None) -> Gauge:
        gauge = Gauge(f"retraind_{name}", text, tuple(labels or ()), registry=self.registry)
        for label, values in (labels or {}).items():
            for value in values:
                gauge.labels(**{label: value}).set(0)
        return gauge

    def _counter(self, name: str, text: str, labels: Mapping[str, tuple[str, ...]] | None = None) -> Counter:
        counter = Counter(f"retraind_{name}", text, tuple(labels or ()), registry=self.registry)
        for label, values in (labels or {}).items():
            for value in values:
                counter.labels(**{label: value})
        return counter

    def _histogram(self, name: str, text: str, labels: Mapping[str, tuple[str, ...]] | None = None) -> Histogram:
        histogram = Histogram(f"retraind_{name}", text, tuple(labels or ()), buckets=_SECONDS, registry=self.registry)
        for label, values in (labels or {}).items():
            for value in values:
                histogram.labels(**{label: value})
        return histogram

    def _service_metrics(self) -> None:
        build = Gauge("retraind_build_info", "Version of the service.", ("version", "python"), registry=self.registry)
        build.labels(__version__, platform.python_version()).set(1)
        self._ready = self._gauge("ready", "1 when spool, state, models directory and port are usable.")
        self._fault = self._gauge("fault", "1 while this fault of the machine is being waited out.", {"fault": FAULTS})
        self._reload_success = self._gauge("config_last_reload_successful", "1 when the last reload was accepted.")
        self._reload_success.set(1)
        self._reload_at = self._gauge(
            "config_last_reload_success_timestamp_seconds", "When a configuration was last accepted."
        )
        self._reload_at.set_to_current_time()
        self._bad_records = self._counter("bad_records", "Job records that could not be read and were put aside.")

    def _spool_metrics(self) -> None:
        states = ("incoming_settling", "incoming_ready", "incoming_refused", "active", "done", "quarantine")
        self._spool_files = self._gauge("spool_files", "Files in the spool by state.", {"state": states})
        self._spool_bytes = self._gauge("spool_bytes", "Bytes in the spool by state.", {"state": states})
        self._spool_oldest = _Series(
            "spool_oldest_file_timestamp_seconds",
            "Modification time of the oldest file by state; absent when there is none.",
            "state",
        )
        self.registry.register(self._spool_oldest)
        self._stale_temporaries = self._gauge(
            "spool_stale_temporary_files", "Temporary names in incoming/ older than 36 hours."
        )
        self._scans = self._counter("scans", "Scans of incoming/.")
        self._watch_events = self._counter("watch_events", "inotify events on incoming/.")
        self._watch_mode = self._gauge(
            "watch_mode", "1 for the way in which incoming/ is watched.", {"mode": ("inotify", "poll")}
        )
        self._watch_healthy = self._gauge(
            "watch_healthy", "1 when inotify watches incoming/, 0 while the scan alone does."
        )

    def _job_metrics(self) -> None:
        self._jobs = self._counter("jobs", "Ended jobs by result.", {"result": RESULTS})
        codes = (*QUARANTINE_CODES, "other")
        self._quarantined = self._counter("quarantined", "Quarantined datasets by code.", {"code": codes})
        retries = tuple(RETRIES.values())
        self._retries = self._counter("job_retries", "Attempts that are to be repeated, by cause.", {"cause": retries})
        self._job_seconds = self._histogram("job_duration_seconds", "From the claim of a dataset to its end.")
        self._stage_seconds = self._histogram(
            "stage_duration_seconds", "Duration of completed stages.", {"stage": STAGES}
        )
        self._rows_used = self._counter("rows_used", "Rows that were used for training.")
        self._rows_dropped = self._counter("rows_dropped", "Rows that were not used.", {"reason": DROP_REASONS})
        self._exits = self._counter("worker_exits", "Ended workers by reason.", {"reason": EXIT_REASONS})
        self._peak = self._gauge("worker_peak_memory_bytes", "Greatest resident size of the last worker that finished.")
        self._unknown_events = self._counter("unknown_events", "Events from workers that were not understood.")
        self._active = self._gauge("job_active", "1 while a worker runs.")
        self._device = self._gauge("job_device", "1 for the device of the running job.", {"device": ("cpu", "cuda")})
        self._current = _Optional(
            "job",
            {
                "epoch": "Running epoch; absent when no job trains.",
                "epochs": "Epochs to run; absent when no job trains.",
                "rows_per_second": "Training speed; absent when no job trains.",
                "loss": "Running mean of the training loss; absent when no job trains.",
            },
        )
        self.registry.register(self._current)

    def _model_metrics(self) -> None:
        self._publish_failures = self._counter("publish_failures", "Publications that failed and are tried again.")
        self._info = _Series("model_info", "The live version.", "version")
        self.registry.register(self._info)
        self._live = _Optional(
            "model",
            {
                "heldout_loss": "Held-out loss of the live version.",
                "mean_loss": "Loss of predicting each metric's mean on the same held-out rows.",
                "rows": "Rows that the live version was trained on.",
                "metrics": "Metrics that the live version takes.",
                "last_publish_timestamp_seconds": "When the live version was published.",
            },
        )
        self._last = _Optional("job", {"last_success_timestamp_seconds": "When a job last ended published."})
        self.registry.register(self._live)
        self.registry.register(self._last)

    # What the loop tells, in the order of a service's life.

    def ready(self, is_ready: bool) -> None:
        self._ready.set(is_ready)

    def fault(self, name: str, *, on: bool) -> None:
        self._fault.labels(name).set(on)

    def config_reloaded(self, *, success: bool) -> None:
        self._reload_success.set(success)
        if success:
            self._reload_at.set_to_current_time()

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
        usages["active"] = _total([count(path) for path in spool.active.iterdir()])
        for state, entries in (("settling", scan.settling), ("ready", scan.ready), ("refused", scan.refused)):
            first_ns = min((entry.mtime_ns for entry in entries), default=None)
            size = sum(entry.size for entry in entries)
            usages[f"incoming_{state}"] = Usage(len(entries), size, None if first_ns is None else first_ns / 1e9)
        for state, usage in usages.items():
            self._spool_files.labels(state).set(usage.num_files)
            self._spool_bytes.labels(state).set(usage.num_bytes)
        self._spool_oldest.values = {state: u.oldest for state, u in usages.items() if u.oldest is not None}

    def started(self) -> None:
        self._active.set(1)

    def stage_ended(self, stage: str, seconds: float) -> None:
        if stage in STAGES:
            self._stage_seconds.labels(stage).observe(seconds)

    def rows_seen(self, num_used: int, num_dropped: Mapping[str, int]) -> None:
        self._rows_used.inc(_bounded(num_used))
        for reason, number in num_dropped.items():
            self._rows_dropped.labels(reason if reason in DROP_REASONS else "other").inc(_bounded(number))

    def progress(self, event: events.Progress) -> None:
        values = {"epoch": event.epoch, "epochs": event.epochs, "rows_per_second": event.rows_per_second}
        if event.loss is not None and math.isfinite(event.loss):
            values["loss"] = event.loss
        self._current.values = {name: _bounded(value) for name, value in values.items()}
        for device in ("cpu", "cuda"):
            self._device.labels(device).set(device == event.device.partition(":")[0])

    def worker_ended(self, reason: str, peak_bytes: int) -> None:
        """Counts the exit, and takes away what was true of the running job only."""
        self._exits.labels(reason).inc()
        if peak_bytes:
            self._peak.set(_bounded(peak_bytes))
        self._active.set(0)
        for device in ("cpu", "cuda"):
            self._device.labels(device).set(0)
        self._current.values = {}

    def unknown_events(self, number: int) -> None:
        self._unknown_events.inc(number)

    def retried(self, disposition: Disposition) -> None:
        if disposition in RETRIES:
            self._retries.labels(RETRIES[disposition]).inc()

    def publish_failed(self) -> None:
        self._publish_failures.inc()

    def published(self, manifest: Manifest) -> None:
        """The live version, now or found at the start."""
        self._info.values = {manifest.version: 1}
        self._live.values = {
            "heldout_loss": manifest.evaluation.heldout_loss,
            "mean_loss": manifest.evaluation.mean_loss,
            "rows": _bounded(manifest.dataset.num_rows),
            "metrics": len(manifest.metric_names),
            "last_publish_timestamp_seconds": manifest.published_at.timestamp(),
        }

    def job_ended(self, result: str, code: str, seconds: float) -> None:
        self._jobs.labels(result).inc()
        self._job_seconds.observe(seconds)
        if result == "published":
            self._last.values = {"last_success_timestamp_seconds": time.time()}
        if result == "quarantined":
            self._quarantined.labels(code if code in QUARANTINE_CODES else "other").inc()

    def render(self, accept: str, accept_encoding: str) -> tuple[bytes, str, str | None]:
        """Body, content type and content encoding for a scrape's Accept and Accept-Encoding headers."""
        try:
            encoder, content_type = choose_encoder(accept if accept.isprintable() else "")
        except (TypeError, ValueError):  # "version=x": the library compares its parts as numbers
            encoder, content_type = choose_encoder("")
        body = encoder(self.registry)
        if _takes_gzip(accept_encoding):
            return gzip.compress(body, compresslevel=1), content_type, "gzip"
        return body, content_type, None


def _total(usages: list[Usage]) -> Usage:
    times = [usage.oldest for usage in usages if usage.oldest is not None]
    num_files, num_bytes = sum(usage.num_files for usage in usages), sum(usage.num_bytes for usage in usages)
    return Usage(num_files, num_bytes, min(times, default=None))


def _bounded(number: float) -> float:
    return float(min(max(number, 0), _MAX_NUMBER))


def _takes_gzip(accept_encoding: str) -> bool:
    """RFC 9110: a weight of 0 means "not this one"."""
    for coding in accept_encoding.lower().replace(" ", "").split(","):
        name, _, weight = coding.partition(";")
        if name == "gzip":
            return weight.rstrip("0.") != "q="
    return False
