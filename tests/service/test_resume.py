"""The service with jobs that are killed and stopped while they train: each goes on where it was."""

import json
import sys
import time
from pathlib import Path

import pytest
from harness import Service, eventually

KILLED_WORKER = Path(__file__).resolve().parents[1] / "fakes" / "killed_worker.py"
# What systemd waits for, TimeoutStopSec, less a margin.
STOP_SECONDS = 20.0


def rows(num_rows: int) -> str:
    lines = (
        ",".join(str((number * 7919 + metric * 104_729) % 1000 / 10) for metric in range(4))
        for number in range(num_rows)
    )
    return "\n".join(["cpu,load,disk,net", *lines]) + "\n"


@pytest.fixture
def planned(make_service) -> Service:
    """The service with the real worker, which is killed as spool/../plan says, one line an attempt."""
    service = make_service(
        fake=False, training={"epochs": 4, "batch_size": 64}, worker={"stop_seconds": 15.0, "keep_ready_seconds": 0}
    )
    plan = service.root / "plan"
    launcher = service.root / "killed-python"
    launcher.write_text(
        f'#!/bin/sh\nexport RETRAIND_TEST_PLAN="{plan}"\nexec "{sys.executable}" "{KILLED_WORKER}" "$@"\n'
    )
    launcher.chmod(0o755)
    service.settings["worker"]["python"] = str(launcher)
    service.write_config()
    return service


@pytest.mark.slow
def test_a_job_that_is_killed_and_stopped_goes_on_and_publishes_the_weights_of_one_that_was_not(planned) -> None:
    plan = planned.root / "plan"
    plan.write_text("keep 4\nwait 1\n")
    planned.start()
    planned.drop("node.csv", rows(641))
    # The first attempt is killed after step 12; the second goes on in epoch 2 of 4, and stands there.
    eventually(lambda: planned.metric("retraind_job_resumes_total") == 1)
    eventually(lambda: planned.metric("retraind_job_epoch") == 2)
    eventually(lambda: str(planned.status()["text"]).startswith("training node.csv: epoch 2/4"))
    assert planned.states() == {"node.csv": "running"}
    assert planned.jobs()[0]["attempts"] == 2
    assert planned.metric("retraind_job_checkpoints_total") == 3, "the fourth was durable, but not told any more"
    stopped_at = time.monotonic()
    assert planned.stop() == 0
    assert time.monotonic() - stopped_at < STOP_SECONDS
    (job,) = planned.jobs()
    assert (job["state"], job["attempts"]) == ("queued", 1)
    work_dir = planned.state / "jobs" / str(job["id"]) / "work"
    assert {path.name for path in work_dir.iterdir()} == {"order.json", "checkpoint"}
    planned.start()
    planned.wait_for_state("node.csv", "published")
    # It stood after step 13, and heard of the stop in the next.
    assert "training goes on from a checkpoint: epoch 2 of 4, step 14" in planned.log()
    eventually(lambda: not work_dir.exists(), "nothing of the job's work is left")
    live = planned.live()
    assert live["training"]["num_resumes"] == 2
    assert live["training"]["num_steps"] == 36

    source = planned.spool / "done" / "node.csv"
    undisturbed = planned.command("train", str(source), "--models", str(planned.root / "elsewhere"), "--json")
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = json.loads(undisturbed.stdout)
    assert expected["training"]["num_resumes"] == 0
    assert live["weights_sha256"] == expected["weights_sha256"]
    assert live["training"]["epoch_losses"] == expected["training"]["epoch_losses"]
    assert live["evaluation"] == expected["evaluation"]


def test_the_checkpoint_of_a_stopped_job_is_there_for_the_next_attempt_and_gone_with_the_job(service: Service) -> None:
    service.drop("hold.csv")
    eventually(lambda: service.metric("retraind_job_checkpoints_total") == 1)
    assert service.metric("retraind_job_resumes_total") == 0
    assert service.stop() == 0
    (checkpoint,) = service.state.glob("jobs/*/work/checkpoint")
    service.start()
    eventually(lambda: service.metric("retraind_job_resumes_total") == 1)
    (service.spool / "release").touch()
    service.wait_for_state("hold.csv", "published")
    eventually(lambda: not checkpoint.parent.exists())


@pytest.mark.slow
def test_train_in_the_foreground_goes_on_after_a_crash_of_its_worker(planned) -> None:
    (planned.root / "plan").write_text("keep 4\n")
    source = planned.root / "kept.csv"
    source.write_text(rows(641))
    result = planned.command("train", str(source), "--models", str(planned.root / "elsewhere"), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["training"]["num_resumes"] == 1
