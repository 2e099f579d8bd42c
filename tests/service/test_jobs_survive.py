"""Kills, stops, crashes and broken machines: nothing is lost, nothing is trained twice, no dataset takes the blame."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from harness import Service, eventually


def _worker_pid(service: Service) -> int:
    children = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children")
    return int(eventually(lambda: children.read_text().split(), "a worker")[0])


def candidate_of(manifest: dict[str, Any]) -> dict[str, object]:
    """What the worker must have left for this manifest."""
    kept = ("weights_sha256", "weights_bytes", "shape", "dataset", "scaler", "training", "evaluation", "versions")
    tensors = [{"name": "w", "shape": [1], "dtype": "float32", "is_finite": True}]
    return {**{key: manifest[key] for key in kept}, "tensors": tensors, "expected": tensors}


def test_a_poison_file_is_quarantined_after_three_kills_while_a_good_one_passes(service: Service) -> None:
    service.drop("kill.csv")
    eventually(lambda: service.trained() == ["kill.csv"], "the first attempt")
    service.drop("good.csv")
    service.wait_for_state("good.csv", "published")
    job = service.wait_for_state("kill.csv", "quarantined")
    assert service.trained().count("kill.csv") == 3
    assert service.trained().index("good.csv") < 3, "the good file did not wait for the poison to be given up"
    reason = service.reason("kill.csv")
    assert reason == {
        "code": "worker_crash", "message": reason["message"], "line": None, "column": None, "remedy": "",
        "sha256": "", "attempts": 3, "job": job["id"],
    }  # fmt: skip
    assert "SIGKILL" in str(reason["message"])
    assert (service.spool / "quarantine" / "kill.csv").read_bytes() == b"kill.csv"
    assert service.metric("retraind_worker_exits_total", reason="killed") == 3
    assert service.metric("retraind_quarantined_total", code="worker_crash") == 1


def test_attempts_are_remembered_across_a_restart(make_service) -> None:
    service = make_service(worker={"max_attempts": 3}).start()
    service.drop("kill.csv")
    eventually(lambda: service.jobs() and service.jobs()[0]["attempts"] == 2, "a second attempt")
    service.wait_for_state("kill.csv", "deferred")
    service.kill()
    service.start()
    service.wait_for_state("kill.csv", "quarantined")
    assert len(service.trained()) == 3


def test_sigterm_sends_a_running_job_back_to_the_queue_and_it_is_trained_after_the_restart(service: Service) -> None:
    service.drop("hold.csv")
    pid = _worker_pid(service)
    eventually(service.trained)
    assert service.stop() == 0
    assert not Path(f"/proc/{pid}").exists()
    assert service.states() == {"hold.csv": "queued"}
    assert service.jobs()[0]["attempts"] == 0
    assert "STOPPING=1" in service.notifications()
    (service.spool / "release").touch()
    service.start()
    service.wait_for_state("hold.csv", "published")
    assert service.live()["sequence"] == 1


def test_a_worker_that_ignores_sigterm_is_ended_within_the_stop_time(make_service) -> None:
    service = make_service(worker={"stop_seconds": 0.5}).start()
    service.drop("stubborn.csv")
    eventually(lambda: service.status()["state"] == "working" and "epoch" in str(service.status()["text"]))
    assert service.stop() == 0
    assert service.states() == {"stubborn.csv": "queued"}


def test_kill_9_of_the_service_takes_the_worker_along_and_loses_nothing(service: Service) -> None:
    service.drop("hold.csv")
    eventually(service.trained)
    service.kill()
    assert service.states() == {"hold.csv": "running"}
    (service.spool / "release").touch()
    service.start()
    job = service.wait_for_state("hold.csv", "published")
    assert job["attempts"] == 1, "the service's end is not the dataset's fault"
    eventually(lambda: service.names("done") == ["hold.csv"])


def test_kill_9_of_the_worker_is_one_attempt_and_the_job_is_trained(service: Service) -> None:
    service.drop("hold.csv")
    pid = _worker_pid(service)
    eventually(service.trained)
    os.kill(pid, signal.SIGKILL)
    (service.spool / "release").touch()
    job = service.wait_for_state("hold.csv", "published")
    assert job["attempts"] == 2


def test_a_candidate_that_was_complete_when_the_service_died_is_published_and_not_trained_again(make_service) -> None:
    service = make_service()
    (service.models / "telemetry_autoencoder").mkdir(parents=True)
    service.start()
    versions = service.models / "telemetry_autoencoder" / "versions"
    versions.rename(versions.with_name("away"))
    versions.write_text("in the way")
    service.drop("a.csv")  # found before the next check of the models directory, or after its healing
    eventually(lambda: service.metric("retraind_fault", fault="models") == 1)
    service.kill()
    versions.unlink()
    service.start()
    service.wait_for_state("a.csv", "published")
    assert service.trained() == ["a.csv"]


def test_a_duplicate_whose_end_was_not_written_down_is_not_published_again(service: Service) -> None:
    service.drop("a.csv", "one content")
    first = service.wait_for_state("a.csv", "published")
    eventually(lambda: service.names("done") == ["a.csv"])
    service.kill()
    record = service.state / "jobs" / str(first["id"]) / "job.json"
    job_id = f"{first['id']}"[:-4] + "ffff"  # trained before it was known as a duplicate, then the service died
    claim, work = service.spool / "active" / job_id, service.state / "jobs" / job_id / "work"
    claim.mkdir()
    work.mkdir(parents=True)
    (claim / "b.csv").write_text("one content")
    (work / "weights.pt").write_text("one content")
    candidate = candidate_of(service.live())
    (work / "candidate.json").write_text(json.dumps(candidate))
    changes = {"id": job_id, "name": "b.csv", "state": "running", "version": ""}
    (work.parent / "job.json").write_text(json.dumps({**json.loads(record.read_text()), **changes}))
    service.start()
    service.wait_for_state("b.csv", "duplicate")
    eventually(lambda: service.names("done") == ["a.csv", "b.csv"])
    assert service.live()["sequence"] == 1


@pytest.mark.parametrize("state", ["no record", "empty record", "half a record"])
def test_a_claimed_file_with_a_broken_record_is_trained_once(make_service, state: str) -> None:
    service = make_service()
    job_id = "20260101T000000Z-abcd"
    claim = service.spool / "active" / job_id
    claim.mkdir(parents=True)
    (claim / "orphan.csv").write_text("orphan")
    (service.spool / "active" / "20260101T000000Z-ffff").mkdir()
    if state != "no record":
        record = service.state / "jobs" / job_id / "job.json"
        record.parent.mkdir(parents=True)
        record.write_text("" if state == "empty record" else '{"id": "20260101T0000')
    service.start()
    service.wait_for_state("orphan.csv", "published")
    assert service.trained() == ["orphan.csv"]
    eventually(lambda: not list((service.spool / "active").iterdir()))
    if state != "no record":
        assert service.metric("retraind_bad_records_total") == 1
        assert (service.state / "jobs" / job_id / "job.json.bad").exists()


@pytest.mark.parametrize(
    ("name", "code", "attempts"),
    [("refuse.csv", "malformed", 1), ("crash.csv", "worker_crash", 2), ("garbage.csv", "protocol", 2)],
)
def test_a_bad_dataset_gets_a_reason_file_a_counter_and_the_next_one_is_trained(
    make_service, name: str, code: str, attempts: int
) -> None:
    service = make_service(worker={"max_attempts": 2}).start()
    service.drop("before.csv")
    service.wait_for_state("before.csv", "published")
    live = service.live()
    service.drop(name)
    service.wait_for_state(name, "quarantined")
    eventually(lambda: service.names("quarantine") == [name])
    reason = service.reason(name)
    assert (reason["code"], reason["attempts"]) == (code, attempts)
    assert service.metric("retraind_quarantined_total", code=code) == 1
    assert service.live() == live
    assert service.log().count(f"{name} quarantined") == 1
    service.drop("after.csv")
    service.wait_for_state("after.csv", "published")


def test_a_refusal_names_the_line_and_the_column(service: Service) -> None:
    service.drop("refuse.csv")
    service.wait_for_state("refuse.csv", "quarantined")
    reason = service.reason("refuse.csv")
    assert (reason["line"], reason["column"], reason["remedy"]) == (3, 2, "look at line 3")
    assert "malformed at line 3, column 2: cell is no number (look at line 3)" in service.log()


def test_a_silent_worker_is_ended_and_counted(make_service) -> None:
    service = make_service(worker={"silence_seconds": 0.5, "max_attempts": 1}).start()
    service.drop("mute.csv")
    service.wait_for_state("mute.csv", "quarantined")
    assert service.metric("retraind_worker_exits_total", reason="silent") == 1
    assert service.reason("mute.csv")["code"] == "silent"


def test_a_job_beyond_its_time_is_ended(make_service) -> None:
    service = make_service(worker={"max_seconds": 1.0, "max_attempts": 1}).start()
    service.drop("hold.csv")
    service.wait_for_state("hold.csv", "quarantined")
    assert service.reason("hold.csv")["code"] == "timeout"


def test_out_of_memory_is_tried_again_with_half_the_batch(service: Service) -> None:
    service.drop("memory.csv")
    service.wait_for_state("memory.csv", "published")
    assert service.live()["training"]["batch_size"] == 512
    assert len(service.trained()) == 3


def test_a_machine_fault_defers_uses_no_attempt_and_heals_by_itself(service: Service) -> None:
    service.drop("host.csv")
    service.wait_for_state("host.csv", "deferred")
    text = eventually(lambda: str(service.status()["text"]) if service.status()["faults"] else "")
    assert text.startswith("deferred: gpu.present: no GPU; next try in")
    assert service.metric("retraind_fault", fault="preflight") == 1
    assert service.metric("retraind_preflight_check", check="gpu.present", status="fail") == 1
    service.drop("other.csv")
    (service.spool / "healed").touch()
    job = service.wait_for_state("host.csv", "published")
    assert job["attempts"] == 1
    service.wait_for_state("other.csv", "published")
    assert service.metric("retraind_fault", fault="preflight") == 0
    assert service.metric("retraind_preflight_check", check="gpu.present", status="fail") == 0
    assert service.metric("retraind_preflight_check", check="gpu.present", status="skip") == 1
    assert service.names("quarantine") == []


def test_a_dataset_that_waits_for_its_reader_holds_up_no_other_and_is_read_once_it_is_there(service: Service) -> None:
    service.drop("reader.csv")
    job = service.wait_for_state("reader.csv", "deferred")
    assert job["reason"]["code"] == "no_reader"
    for name in ("one.csv", "two.csv"):
        service.drop(name)
        service.wait_for_state(name, "published")
    assert service.metric("retraind_job_retries_total", cause="no_reader") >= 1
    assert service.metric("retraind_fault", fault="worker") == 0
    assert service.status()["faults"] == {}
    service.stop()
    service.start()  # a restart forgets nothing, and looks at once
    job = service.wait_for_state("reader.csv", "deferred")
    (service.spool / "healed").touch()
    service.signal(signal.SIGHUP)
    assert service.wait_for_state("reader.csv", "published")["attempts"] == 1
    assert service.names("quarantine") == []


def test_a_worker_interpreter_that_does_not_run_defers_and_heals(make_service) -> None:
    service = make_service()
    good = service.settings["worker"]["python"]
    service.settings["worker"]["python"] = "/nowhere/python"
    service.write_config()
    service.start()
    service.drop("a.csv")
    service.wait_for_state("a.csv", "deferred")
    assert service.metric("retraind_fault", fault="worker") == 1
    service.settings["worker"]["python"] = good
    service.write_config()
    service.signal(signal.SIGHUP)
    service.wait_for_state("a.csv", "published")


def test_a_models_directory_that_fails_holds_the_weights_and_publishes_once_it_is_back(service: Service) -> None:
    service.drop("hold.csv")
    eventually(service.trained)
    versions = service.models / "telemetry_autoencoder" / "versions"
    versions.rename(versions.with_name("away"))
    versions.write_text("in the way")
    (service.spool / "release").touch()
    service.wait_for_state("hold.csv", "trained")
    eventually(lambda: str(service.status()["text"]).startswith("degraded: "))
    assert service.metric("retraind_publish_failures_total") >= 1
    assert service.live() is None
    service.drop("waits.csv")
    versions.unlink()
    versions.with_name("away").rename(versions)
    service.wait_for_state("hold.csv", "published")
    service.wait_for_state("waits.csv", "published")
    assert service.trained() == ["hold.csv", "waits.csv"], "nothing was trained twice"
    assert service.names("quarantine") == []


def test_an_archive_that_fails_is_retried_and_the_model_is_published_once(service: Service) -> None:
    service.drop("hold.csv")
    eventually(service.trained)
    done = service.spool / "done"
    done.rmdir()
    done.write_text("in the way")
    (service.spool / "release").touch()
    service.wait_for_state("hold.csv", "published")
    eventually(lambda: service.status()["faults"], "the fault is told")
    done.unlink()
    done.mkdir()
    eventually(lambda: service.names("done") == ["hold.csv"])
    assert service.trained() == ["hold.csv"]
    assert service.live()["sequence"] == 1


def test_a_candidate_with_non_finite_weights_is_rejected_and_the_model_stays(service: Service) -> None:
    service.drop("good.csv")
    service.wait_for_state("good.csv", "published")
    service.drop("gate.csv")
    service.wait_for_state("gate.csv", "rejected")
    eventually(lambda: service.names("quarantine") == ["gate.csv"])
    assert service.reason("gate.csv")["code"] == "non_finite_weights"
    assert service.live()["dataset"]["name"] == "good.csv"
    assert service.metric("retraind_jobs_total", result="rejected") == 1


def test_a_quarantined_dataset_can_be_queued_again(service: Service) -> None:
    service.drop("refuse.csv")
    job = service.wait_for_state("refuse.csv", "quarantined")
    eventually(lambda: service.names("quarantine") == ["refuse.csv"])
    result = service.command("requeue", str(job["id"]))
    assert result.returncode == 0, result.stderr
    eventually(lambda: len(service.trained()) == 2)
    eventually(lambda: service.names("quarantine") == ["refuse.csv"])
    assert service.reason("refuse.csv")["job"] != job["id"]
    assert service.command("requeue", "--all-quarantined").returncode == 0
    eventually(lambda: len(service.trained()) == 3)
    missing = service.command("requeue", "20260101T000000Z-0000")
    assert missing.returncode == 64
    assert "retraind jobs" in missing.stderr


def test_a_second_service_on_the_same_spool_refuses_to_start(service: Service) -> None:
    other = service.command("serve")
    assert other.returncode == 69
    assert "already_running" in other.stderr
    service.drop("a.csv")
    service.wait_for_state("a.csv", "published")


def test_a_record_never_leaves_the_table_of_states(service: Service) -> None:
    for name in ("a.csv", "refuse.csv", "gate.csv"):
        service.drop(name)
    for name, state in (("a.csv", "published"), ("refuse.csv", "quarantined"), ("gate.csv", "rejected")):
        service.wait_for_state(name, state)
    assert {job["state"] for job in json.loads(service.command("jobs", "--json").stdout)} == {
        "published",
        "quarantined",
        "rejected",
    }


def test_kill_9_at_random_moments_loses_nothing_and_publishes_each_dataset_once(service: Service) -> None:
    service.settings["models"]["keep"] = None  # every version is looked at in the end
    service.write_config()
    service.kill()
    service.start()
    rng = random.Random(13)
    names = [f"{number:03}.csv" for number in range(40)]
    for name in names[:20]:
        service.drop(name)
    for round_number in range(25):
        moment = time.monotonic() + rng.uniform(0.0, 0.8)
        eventually(lambda moment=moment: time.monotonic() >= moment, "a random moment of the job's life")
        if rng.random() < 0.3:
            children = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
        service.kill()
        if round_number < 20:
            service.drop(names[20 + round_number])
        service.start(wait=round_number % 3 == 0)
    service.kill()
    service.start()
    eventually(lambda: service.names("done") == names, "every dataset archived")
    eventually(lambda: not list((service.spool / "active").iterdir()), "the directories of ended jobs are gone")
    assert service.names("quarantine") == []
    versions = [json.loads(path.read_text()) for path in service.models.glob("*/versions/*/manifest.json")]
    assert sorted(version["dataset"]["name"] for version in versions) == names, "each published once"
    assert sorted(version["sequence"] for version in versions) == list(range(1, 41))
    assert not list(service.models.glob("*/versions/.new-*")), "nothing half built is left"
    assert {job["state"] for job in service.jobs()} == {"published"}
