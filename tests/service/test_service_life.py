"""Start, reload, stop, and what the service says of itself: to systemd, to Prometheus, to an operator."""

import json
import os
import re
import signal
import socket
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Service, eventually


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_ready_comes_when_spool_models_and_port_are_usable(service: Service) -> None:
    assert service.get("/-/ready") == "ready\n"
    assert service.get("/-/healthy").startswith("the loop turned")
    assert "retraind_ready 1.0" in service.get("/metrics")
    for name in ("incoming", "active", "done", "quarantine"):
        assert (service.spool / name).is_dir()
    assert (service.spool / "incoming").stat().st_mode & 0o7777 == 0o3730
    assert (service.models / "telemetry_autoencoder").stat().st_mode & 0o777 == 0o755


def test_status_tells_what_the_service_is_doing(service: Service) -> None:
    service.drop("hold-42.csv")
    line = "STATUS=training hold-42.csv: epoch 5/5, loss 0.7413, 512k rows/s, 8 s left"
    eventually(lambda: line in service.notifications(), "progress in STATUS")
    service.drop("next.csv")
    eventually(lambda: f"{line}; 1 file waiting" in service.notifications(), "the queue in STATUS")
    status = json.loads(service.command("status", "--json").stdout)
    assert status["running"] is True
    assert status["status"]["state"] == "working"
    (service.spool / "release").touch()
    service.wait_for_state("next.csv", "published")
    live = service.live()["version"]
    eventually(lambda: f"STATUS=idle: {live} is live" in service.notifications(), "idle")
    assert service.stop() == 0
    eventually(lambda: "STOPPING=1" in service.notifications())
    assert service.command("status").returncode == 69


def test_the_watchdog_is_answered_from_the_loop_also_while_a_worker_runs(make_service) -> None:
    service = make_service()
    service.start(WATCHDOG_USEC="600000")
    service.drop("hold.csv")
    eventually(service.trained)
    service.notifications().clear()
    eventually(lambda: service.notifications().count("WATCHDOG=1") >= 5, "answers while a job runs")
    assert not any("WATCHDOG" in line and line != "WATCHDOG=1" for line in service.notifications())


def test_a_watchdog_meant_for_another_process_is_not_answered(make_service) -> None:
    service = make_service(intake={"rescan_seconds": 0.1})
    service.start(WATCHDOG_USEC="300000", WATCHDOG_PID="1")
    eventually(lambda: service.metric("retraind_scans_total") > 20, "time goes by")
    assert "WATCHDOG=1" not in service.notifications()


def test_a_reload_is_told_with_its_time_and_changes_what_the_next_job_uses(service: Service) -> None:
    service.drop("first.csv")
    service.wait_for_state("first.csv", "published")
    assert service.live()["training"]["seed"] == 0
    service.settings["training"] = {"seed": 7}
    service.settings["metrics"]["listen"] = "127.0.0.1:1"
    service.write_config()
    service.notifications().clear()
    service.signal(signal.SIGHUP)
    eventually(lambda: "READY=1" in service.notifications(), "the reload's end")
    lines = service.notifications()
    assert lines.index("RELOADING=1") < lines.index("READY=1")
    assert any(re.fullmatch(r"MONOTONIC_USEC=\d+", line) for line in lines)
    assert "metrics.listen has changed: it takes effect at the next restart" in service.log()
    service.drop("second.csv")
    service.wait_for_state("second.csv", "published")
    assert service.live()["training"]["seed"] == 7


def test_a_broken_configuration_is_refused_at_reload_and_the_old_one_stays(service: Service) -> None:
    service.config_path.write_text(service.config_path.read_text() + "\ntraining: {epochs: 0, sede: 1}\n")
    service.notifications().clear()
    service.signal(signal.SIGHUP)
    eventually(lambda: "READY=1" in service.notifications())
    assert service.metric("retraind_config_last_reload_successful") == 0
    assert service.metric("retraind_fault", fault="config") == 1
    log = service.log()
    assert re.search(r"retraind\.yaml:\d+: training\.epochs: must be at least 1, not 0", log)
    assert "did you mean training.seed?" in log
    service.drop("a.csv")
    service.wait_for_state("a.csv", "published")
    service.write_config()
    service.signal(signal.SIGHUP)
    eventually(lambda: service.metric("retraind_config_last_reload_successful") == 1)
    assert service.metric("retraind_fault", fault="config") == 0


def test_a_reload_during_a_job_leaves_the_job_alone(service: Service) -> None:
    service.drop("hold.csv")
    eventually(service.trained)
    service.settings["training"] = {"seed": 7}
    service.write_config()
    service.signal(signal.SIGHUP)
    eventually(lambda: "configuration reloaded" in service.log())
    (service.spool / "release").touch()
    service.wait_for_state("hold.csv", "published")
    assert service.live()["training"]["seed"] == 0
    assert service.trained() == ["hold.csv"]


def test_a_broken_configuration_at_start_ends_with_78_and_every_error(make_service) -> None:
    service = make_service()
    service.config_path.write_text("device: gpu\ntraining:\n  epochs: none\n  epoch: 1\n")
    service.start(wait=False)
    assert service.wait() == 78
    log = service.log()
    for line, text in ((1, "device: must be one of"), (3, "training.epochs: must be a whole"), (4, "training.epoch:")):
        assert f"retraind.yaml:{line}: {text}" in log
    assert "Traceback" not in log


@pytest.fixture
def holder() -> Iterator[socket.socket]:
    """Somebody else's server on a port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def _start_on_port_of(holder: socket.socket, make_service) -> Service:
    service = make_service(metrics={"listen": f"127.0.0.1:{holder.getsockname()[1]}"})
    service.start(wait=False)
    eventually(lambda: any("port_taken" in line for line in service.notifications()), "it is told")
    return service


def test_a_port_that_is_taken_is_waited_for(make_service, holder: socket.socket) -> None:
    service = _start_on_port_of(holder, make_service)
    assert "READY=1" not in service.notifications()
    eventually(lambda: any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in service.notifications()), "more time")
    holder.close()
    eventually(lambda: "READY=1" in service.notifications(), "READY once the port is free")


def test_a_models_directory_that_can_not_be_made_is_waited_for(make_service) -> None:
    service = make_service()
    service.models.write_text("in the way")
    service.start(wait=False)
    eventually(lambda: any("models_dir_unwritable" in line for line in service.notifications()), "it is told")
    service.models.unlink()
    eventually(lambda: "READY=1" in service.notifications(), "READY once the directory can be made")
    service.drop("a.csv")
    service.wait_for_state("a.csv", "published")


def test_a_stop_while_waiting_for_the_port_ends_cleanly(make_service, holder: socket.socket) -> None:
    assert _start_on_port_of(holder, make_service).stop() == 0


def test_a_scrape_during_training_shows_the_job_and_none_of_it_afterwards(service: Service) -> None:
    before = service.get("/metrics")
    assert "retraind_job_loss" not in before
    service.drop("hold.csv")
    eventually(lambda: service.metric("retraind_job_epoch") == 5, "the epoch")
    assert service.metric("retraind_job_loss") == pytest.approx(0.7413)
    assert service.metric("retraind_job_rows_per_second") == 512_000
    assert service.metric("retraind_job_device", device="cpu") == 1
    assert service.metric("retraind_job_active") == 1
    assert service.metric("retraind_spool_files", state="active") in (0, 1)
    (service.spool / "release").touch()
    service.wait_for_state("hold.csv", "published")
    eventually(lambda: service.metric("retraind_job_active") == 0)
    after = service.get("/metrics")
    assert "retraind_job_loss" not in after
    assert service.metric("retraind_job_device", device="cpu") == 0
    assert service.metric("retraind_rows_used_total") == 10
    assert service.metric("retraind_rows_dropped_total", reason="missing") == 1
    assert service.metric("retraind_unknown_events_total") == 1
    assert service.metric("retraind_steps_total") == 5
    assert service.metric("retraind_model_heldout_loss") == 0.5
    assert service.metric("retraind_model_device", device="cpu") == 1
    for directory in ("spool", "models", "state"):
        free = service.metric("retraind_disk_free_bytes", directory=directory)
        assert 0 < free < service.metric("retraind_disk_size_bytes", directory=directory)
    assert service.metric("retraind_stage_duration_seconds_count", stage="publish") == 1
    assert service.metric("retraind_job_last_success_timestamp_seconds") > time.time() - 3600


def test_unknown_paths_are_404(service: Service) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        service.get("/metrics/more")
    assert "/metrics" in service.get("/")


def test_the_live_model_is_known_again_after_a_restart(service: Service) -> None:
    service.drop("a.csv")
    service.wait_for_state("a.csv", "published")
    version = str(service.live()["version"])
    service.stop()
    service.start()
    assert service.metric("retraind_model_info", version=version) == 1
    assert json.loads(service.command("models", "--json").stdout)["live"] == version


def test_an_idle_service_costs_less_than_half_a_percent_of_a_cpu(make_service) -> None:
    service = make_service(intake={"rescan_seconds": 10.0, "quiet_seconds": 2.0}).start()
    pid = service.process.pid
    eventually(lambda: service.status()["state"] == "idle")
    before, since = _cpu_seconds(pid), time.monotonic()
    eventually(lambda: time.monotonic() - since > 12, "a while, a scan of the spool within it")
    assert (_cpu_seconds(pid) - before) / (time.monotonic() - since) < 0.005
