"""What a scrape sees: the frozen names, values that come and go, and numbers that no well-behaved worker sends."""

import gzip
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from builders import JOB_ID, NOW, make_candidate, make_dataset, make_training
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from retraind import events
from retraind.config import PreflightConfig, TrainingConfig
from retraind.errors import QUARANTINE_CODES, Disposition
from retraind.report import Check, Drift, Evaluation, Gpu, Manifest
from retraind.supervisor import faults, metrics, model_metrics
from retraind.supervisor.intake import Entry, Scan
from retraind.supervisor.metrics import DIRECTORIES, FAULTS, Metrics, Space
from retraind.supervisor.spool import Spool
from retraind.worker import preflight

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "metrics.txt"
SUPERVISOR = Path(metrics.__file__).parent
HUGE = 10**400  # a legal JSON number that is no float
GPU = Gpu(
    index=0, uuid="GPU-0", name="Card", pci_address="0000:65:00.0", driver_version="550.54", kernel_module="550.54",
    temperature_celsius=45, memory_free_bytes=5, memory_total_bytes=9, pstate=8, pcie_generation=1, pcie_width=16,
    is_chosen=True,
)  # fmt: skip
NOW_NS = 1_796_000_000 * 10**9


@pytest.fixture
def told() -> Metrics:
    return Metrics()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path)
    for path in (spool.incoming, spool.active, spool.done, spool.quarantined):
        path.mkdir()
    return spool


def make_manifest(**changes: Any) -> Manifest:
    candidate = make_candidate()
    names = ("weights_sha256", "weights_bytes", "shape", "scaler", "dataset", "training", "evaluation", "versions")
    values = {
        "version": "000042-3f2a9c1b7d10", "sequence": 42, "model_name": "m", "published_at": NOW, "job": JOB_ID,
        "metric_names": ["cpu", "load"], "threshold": None, **{name: getattr(candidate, name) for name in names},
    }  # fmt: skip
    return Manifest(**{**values, **changes})


def make_progress(**changes: Any) -> events.Progress:
    values = {"epoch": 3, "epochs": 5, "loss": 0.75, "rows_per_second": 512e3, "seconds_left": 8.0, "device": "cuda:0"}
    return events.Progress(**{**values, **changes})


def samples(told: Metrics, about: str = "retraind_") -> dict[str, float]:
    """Series and value of everything whose series begins so."""
    lines = told.render("", "")[0].decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith(about))
    return {series.removeprefix("retraind_"): float(value) for series, _, value in pairs}


def rises(told: Metrics, before: dict[str, float]) -> dict[str, float]:
    now = samples(told)
    return {series: now[series] - before.get(series, 0) for series in now if now[series] != before.get(series)}


def live_a_life(told: Metrics, spool: Spool) -> None:
    """Everything that is there only at times is there."""
    (spool.done / "a.csv").touch()
    told.scanned(Scan(), spool, "inotify", 1)
    told.disks_seen(dict.fromkeys(DIRECTORIES, Space(free=1, size=2)))
    told.started()
    told.progress(make_progress())
    told.published(make_manifest())
    told.drift_seen(Drift(version="000041-aa", num_rows=1000, num_alarms=1, expected_share=0.001))
    told.job_ended("published", "", 10.0)
    told.checked(events.Checked(checks=[], gpus=[GPU]))


def test_the_names_types_labels_and_help_of_every_metric_are_frozen(told: Metrics, spool: Spool) -> None:
    live_a_life(told, spool)
    lines = []
    for line in told.render("", "")[0].decode().splitlines():
        # The limits of a histogram are frozen once: every one has the same.
        if re.match(r"(# \w+ )?process_", line) or "stage_duration_seconds_bucket" in line:
            continue
        sample = re.sub(r'(version|python)="[^"]*"', r"\1", line).rpartition(" ")[0]
        lines.append(line if line.startswith("#") else sample)
    assert "\n".join(lines) + "\n" == GOLDEN.read_text()


def test_everything_stands_at_zero_from_the_start(told: Metrics) -> None:
    shown = samples(told)
    assert len(shown) > 100
    assert {series.partition("{")[0] for series, value in shown.items() if value} == {
        "build_info", "config_last_reload_successful", "config_last_reload_success_timestamp_seconds",
        "web_config_last_load_successful",
    }  # fmt: skip


def test_promtool_finds_nothing_to_complain_about(told: Metrics, spool: Spool) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    live_a_life(told, spool)
    text = told.render("", "")[0]
    result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, b"")


def test_openmetrics_is_well_formed_and_has_no_creation_times(told: Metrics, spool: Spool) -> None:
    live_a_life(told, spool)
    body, content_type, encoding = told.render("application/openmetrics-text; version=1.0.0", "gzip")
    assert content_type.startswith("application/openmetrics-text; version=")
    assert encoding == "gzip"
    text = gzip.decompress(body).decode()
    families = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert families["retraind_jobs"] == "counter"
    assert families["retraind_stage_duration_seconds"] == "histogram"
    assert "_created" not in text


def test_a_running_jobs_values_are_there_while_it_runs_and_gone_afterwards(told: Metrics) -> None:
    before = samples(told, "retraind_job_")
    told.started()
    told.progress(make_progress())
    during = samples(told, "retraind_job_")
    assert {series: value for series, value in during.items() if before.get(series) != value} == {
        "job_active": 1, 'job_device{device="cuda"}': 1, "job_epoch": 3, "job_epochs": 5, "job_loss": 0.75,
        "job_rows_per_second": 512e3,
    }  # fmt: skip
    told.worker_ended("finished", 0)
    assert samples(told, "retraind_job_") == before


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")])
def test_a_loss_that_is_not_known_is_no_series(told: Metrics, loss: float | None) -> None:
    told.progress(make_progress())
    told.progress(make_progress(loss=loss))
    assert "job_loss" not in samples(told)
    assert samples(told)["job_epoch"] == 3


@pytest.mark.parametrize(
    ("number", "value"),
    [(HUGE, 2.0**63), (-HUGE, 0), (-1, 0), (7, 7)],
    ids=["huge", "minus_huge", "negative", "good"],
)
def test_no_number_of_a_worker_ends_the_loop_or_a_scrape(told: Metrics, number: int, value: float) -> None:
    told.rows_seen(number, {"missing": number})
    told.progress(make_progress(epoch=number, epochs=number, rows_per_second=number))
    told.published(make_manifest(dataset=make_dataset(num_rows=number)))
    shown = samples(told)
    told.worker_ended("finished", number)
    shown |= samples(told, "retraind_worker_peak")
    series = ("rows_used_total", 'rows_dropped_total{reason="missing"}', "job_epoch", "model_rows")
    assert [shown[name] for name in (*series, "worker_peak_memory_bytes")] == [value] * 5


def test_words_that_are_in_no_table_make_no_series(told: Metrics) -> None:
    before = samples(told)
    told.rows_seen(1, {"missing": 2, "unheard_of": 3, "evil\n": 4})
    told.stage_ended("unheard_of", 1.0)
    told.job_ended("quarantined", "unheard_of", 0.0)
    told.job_ended("quarantined", "malformed", 0.0)
    told.retried(Disposition.QUARANTINE)
    told.progress(make_progress(device="tpu"))
    told.checked(events.Checked(checks=[Check(name="unheard_of", status="fail", message="")]))
    told.checked(events.Checked(checks=[Check(name="host.cpu", status="unheard_of", message="")]))
    told.worker_ended("finished", 0)
    after = samples(told)
    assert after.keys() == before.keys()
    raised = {series: rise for series, rise in rises(told, before).items() if "job_duration" not in series}
    assert raised == {
        "rows_used_total": 1, 'rows_dropped_total{reason="missing"}': 2, 'rows_dropped_total{reason="other"}': 7,
        'jobs_total{result="quarantined"}': 2, 'quarantined_total{code="malformed"}': 1,
        'quarantined_total{code="other"}': 1, 'worker_exits_total{reason="finished"}': 1,
    }  # fmt: skip


@pytest.mark.parametrize("result", ["published", "duplicate", "rejected", "quarantined"])
def test_a_job_is_counted_by_its_result_and_only_success_has_a_time(told: Metrics, result: str) -> None:
    before = samples(told)
    told.job_ended(result, "empty" if result == "quarantined" else "", 40.0)
    raised = rises(told, before)
    assert raised[f'jobs_total{{result="{result}"}}'] == 1
    assert raised["job_duration_seconds_sum"] == 40
    assert (raised.get('job_duration_seconds_bucket{le="30.0"}'), raised['job_duration_seconds_bucket{le="100.0"}']) \
        == (None, 1)  # fmt: skip
    assert ("job_last_success_timestamp_seconds" in raised) == (result == "published")
    assert any(series.startswith("quarantined_total") for series in raised) == (result == "quarantined")


@pytest.mark.parametrize(
    ("disposition", "cause"),
    [
        (Disposition.RETRY, "crash"),
        (Disposition.RETRY_SMALLER, "smaller_batch"),
        (Disposition.RETRY_FLOAT32, "float32"),
        (Disposition.DEFER, "machine"),
        (Disposition.WAIT, "no_reader"),
    ],
)
def test_a_repeated_attempt_is_counted_by_its_cause(told: Metrics, disposition: Disposition, cause: str) -> None:
    before = samples(told)
    told.retried(disposition)
    assert rises(told, before) == {f'job_retries_total{{cause="{cause}"}}': 1}


def test_counts_since_the_start_are_not_added_up_twice(told: Metrics, spool: Spool) -> None:
    before = samples(told)
    for total in (3, 3, 5):
        told.scanned(Scan(), spool, "inotify", total)
        told.bad_records(total)
    raised = rises(told, before)
    assert (raised["watch_events_total"], raised["bad_records_total"], raised["scans_total"]) == (5, 5, 3)


def test_the_spool_is_told_by_state(told: Metrics, spool: Spool) -> None:
    entries = [Entry(b"a", 10, NOW_NS, 1, True, 0.0), Entry(b"b", 5, NOW_NS - 10**9, 2, True, 0.0)]
    (spool.active / JOB_ID).mkdir()
    for path in (spool.active / JOB_ID / "c.csv", spool.quarantined / "d.csv"):
        path.write_bytes(b"1234567")
    told.scanned(Scan(ready=entries, settling=entries[:1], num_stale_temporaries=3), spool, "poll", 0)
    shown = samples(told, "retraind_spool_") | samples(told, "retraind_watch_")
    states = ("incoming_settling", "incoming_ready", "incoming_refused", "active", "done", "quarantine")
    assert [shown[f'spool_files{{state="{state}"}}'] for state in states] == [1, 2, 0, 1, 0, 1]
    assert [shown[f'spool_bytes{{state="{state}"}}'] for state in states] == [10, 15, 0, 7, 0, 7]
    assert shown['spool_oldest_file_timestamp_seconds{state="incoming_ready"}'] == NOW_NS / 10**9 - 1
    assert 'spool_oldest_file_timestamp_seconds{state="incoming_refused"}' not in shown
    assert shown["spool_stale_temporary_files"] == 3
    assert (shown['watch_mode{mode="poll"}'], shown['watch_mode{mode="inotify"}'], shown["watch_healthy"]) == (1, 0, 0)
    told.scanned(Scan(), spool, "inotify", 0)
    assert 'spool_oldest_file_timestamp_seconds{state="incoming_ready"}' not in samples(told)


def test_a_filesystem_that_could_not_be_asked_has_no_series(told: Metrics) -> None:
    told.disks_seen({"spool": Space(free=1, size=4), "models": Space(free=2, size=4), "elsewhere": Space(1, 1)})
    assert samples(told, "retraind_disk_") == {
        'disk_free_bytes{directory="spool"}': 1, 'disk_free_bytes{directory="models"}': 2,
        'disk_size_bytes{directory="spool"}': 4, 'disk_size_bytes{directory="models"}': 4,
    }  # fmt: skip
    told.disks_seen({})
    assert samples(told, "retraind_disk_") == {}


def test_what_an_operator_holds_and_what_left_done_is_told(told: Metrics) -> None:
    before = samples(told)
    told.held(queue=True, num_jobs=2)
    told.done_removed(3, 70)
    told.done_removed(1, 7)
    assert rises(told, before) == {
        "queue_held": 1, "jobs_held": 2, "done_removed_files_total": 4, "done_removed_bytes_total": 77,
    }  # fmt: skip


def test_the_last_preflight_says_one_thing_of_each_check(told: Metrics) -> None:
    before = samples(told)
    gpu = Check(name="gpu.present", status="fail", message="")
    told.checked(events.Checked(checks=[gpu, Check(name="host.disk", status="warn", message="")]))
    assert rises(told, before) == {
        'preflight_check{check="gpu.present",status="fail"}': 1, 'preflight_check{check="host.disk",status="warn"}': 1,
    }  # fmt: skip
    passed = Check(name="gpu.present", status="pass", message="")
    for shown in scrapes_at_every_line(told, lambda: told.checked(events.Checked(checks=[passed]))):
        assert sum(value for series, value in shown.items() if "gpu.present" in series) == 1
    assert rises(told, before) == {'preflight_check{check="gpu.present",status="pass"}': 1}


def test_what_the_driver_does_not_tell_of_a_gpu_has_no_series(told: Metrics) -> None:
    before = samples(told)
    second = Gpu(index=1, uuid="GPU-1", name='a "card"\n', temperature_celsius=0)
    told.checked(events.Checked(checks=[], gpus=[GPU, second], fallback="gpu.temperature: hot"))
    shown = samples(told)
    assert shown["preflight_cpu_fallback"] == 1
    assert {series: value for series, value in shown.items() if 'gpu="1"' in series and "info" not in series} == {
        'gpu_temperature_celsius{gpu="1"}': 0
    }
    assert shown['gpu_memory_free_bytes{gpu="0"}'] == 5
    assert sum(series.startswith("gpu_info") for series in shown) == 2
    told.checked(events.Checked(checks=[]))
    assert samples(told) == before


def test_a_worker_gone_mad_makes_no_more_gpus_than_a_machine_has(told: Metrics) -> None:
    told.checked(events.Checked(checks=[], gpus=[Gpu(index=HUGE, pstate=HUGE, temperature_celsius=-5)] * 1000))
    shown = samples(told)
    assert sum(series.startswith("gpu_info") for series in shown) == 64
    assert {value for series, value in shown.items() if series.startswith("gpu_pstate")} == {2.0**63}
    assert {value for series, value in shown.items() if series.startswith("gpu_temperature")} == {0.0}


def test_every_check_of_a_worker_is_in_the_closed_set(tmp_path: Path) -> None:
    found = preflight.run("auto", tmp_path, tmp_path, TrainingConfig(), PreflightConfig(), tmp_path)
    assert tuple(check.name for check in found.checks) == events.CHECKS


def test_steps_are_counted_with_those_that_were_skipped(told: Metrics) -> None:
    before = samples(told)
    told.trained(make_training(num_steps=40, num_skipped_steps=3))
    told.trained(make_training(num_steps=-1, num_skipped_steps=HUGE))
    assert rises(told, before) == {"steps_total": 40, "skipped_steps_total": 3 + 2.0**63}


@pytest.mark.parametrize(
    ("device", "shown"),
    [("cpu", {"cpu": 1, "cuda": 0}), ("cuda:0", {"cpu": 0, "cuda": 1}), ("tpu", {"cpu": 0, "cuda": 0})],
)
def test_the_live_version_was_trained_on_one_device(told: Metrics, device: str, shown: dict[str, int]) -> None:
    told.published(make_manifest(training=make_training(device=device)))
    assert samples(told, "retraind_model_device") == {
        f'model_device{{device="{name}"}}': n for name, n in shown.items()
    }


def scrapes_at_every_line(told: Metrics, act: Any) -> Iterator[dict[str, float]]:
    """What a scrape sees at each line that metrics runs during the act: every moment that a thread could pick."""
    seen: list[dict[str, float]] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in (metrics.__file__, model_metrics.__file__):
            return None
        sys.settrace(None)
        seen.append(samples(told))
        sys.settrace(trace)
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(earlier)
    assert len(seen) > 3
    return iter(seen)


def test_no_scrape_sees_a_file_from_1970_in_the_middle_of_a_scan(told: Metrics, spool: Spool) -> None:
    for scan in (Scan(), Scan(ready=[Entry(b"a", 10, NOW_NS, 1, True, 0.0)]), Scan()):
        for shown in scrapes_at_every_line(told, lambda scan=scan: told.scanned(scan, spool, "inotify", 0)):
            ages = {series: value for series, value in shown.items() if series.startswith("spool_oldest")}
            assert set(ages.values()) <= {NOW_NS / 10**9}, ages


def test_every_scrape_sees_exactly_one_live_version(told: Metrics) -> None:
    assert not any(series.startswith("model_") for series in samples(told))
    told.published(make_manifest())
    newer = make_manifest(
        version="000043-aa", evaluation=Evaluation(num_heldout_rows=1, heldout_loss=0.25, mean_loss=1.0, pca_loss=0.125)
    )
    for shown in scrapes_at_every_line(told, lambda: told.published(newer)):
        assert sum(series.startswith("model_info") for series in shown) == 1
        assert shown["model_heldout_loss"] in (0.5, 0.25)
    assert samples(told, "retraind_model_") == {
        'model_info{version="000043-aa"}': 1, 'model_device{device="cpu"}': 1, 'model_device{device="cuda"}': 0,
        "model_heldout_loss": 0.25, "model_mean_loss": 1, "model_pca_loss": 0.125, "model_rows": 10,
        "model_metrics": 2, "model_last_publish_timestamp_seconds": NOW.timestamp(),
    }  # fmt: skip


def test_drift_is_that_of_the_last_dataset_and_absent_where_nothing_could_score_it(told: Metrics) -> None:
    assert samples(told, "retraind_drift_") == {}
    told.drift_seen(Drift(version="000041-aa", num_rows=2000, num_alarms=500, expected_share=0.001))
    expected = {"drift_alarm_share": 0.25, "drift_expected_share": 0.001, "drift_rows": 2000}
    assert samples(told, "retraind_drift_") == expected
    told.drift_seen(Drift(version="000041-aa", num_rows=HUGE, num_alarms=-HUGE, expected_share=0.001))
    assert samples(told, "retraind_drift_")["drift_alarm_share"] == 0
    told.drift_seen(None)
    assert samples(told, "retraind_drift_") == {}


def test_a_refused_reload_keeps_the_time_of_the_last_good_one(told: Metrics) -> None:
    before = samples(told)
    told.config_reloaded(success=False)
    assert rises(told, before) == {"config_last_reload_successful": -1}
    told.config_reloaded(success=True)
    assert samples(told)["config_last_reload_successful"] == 1


def test_a_fault_is_shown_while_it_lasts(told: Metrics) -> None:
    before = samples(told)
    told.fault("disk", on=True)
    assert rises(told, before) == {'fault{fault="disk"}': 1}
    told.fault("disk", on=False)
    assert rises(told, before) == {}


def test_every_fault_that_the_supervisor_shows_has_its_series() -> None:
    source = "".join(path.read_text() for path in SUPERVISOR.glob("*.py"))
    shown = set(re.findall(r"faults\.(?:show|heal)\(\"(\w+)\"", source)) | faults.BLOCKING | set(faults.OF_WORKER)
    assert shown == set(FAULTS)


def test_every_code_of_the_quarantine_has_its_series(told: Metrics) -> None:
    codes = {re.search(r'code="(\w+)"', series)[1] for series in samples(told, "retraind_quarantined_total")}
    assert codes == {*QUARANTINE_CODES, "other"}
