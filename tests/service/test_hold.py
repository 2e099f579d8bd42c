"""An operator's hand on the queue: what is held is not started, whoever is killed when, and goes on once released."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Service, eventually

GOOD, RUNNING = "good.csv", "hold.csv"  # the worker of the second one runs until it is let go


def let_go(service: Service) -> None:
    (service.spool / "release").touch()


def run_one(service: Service) -> str:
    """A job whose worker is at work."""
    service.drop(RUNNING)
    eventually(lambda: service.trained() == [RUNNING], "a worker at work")
    return str(service.jobs()[0]["id"])


def obey(service: Service, *words: str) -> str:
    done = service.command(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_held_queue_starts_nothing_until_it_is_released(service: Service) -> None:
    assert "the queue is held" in obey(service, "hold", "--all")
    service.drop(GOOD)
    eventually(lambda: service.metric("retraind_spool_files", state="incoming_ready") == 1, "the file is complete")
    text = "held: nothing is started until `retraind release --all`; 1 file waiting"
    eventually(lambda: (service.status()["state"], service.status()["text"]) == ("held", text))
    eventually(lambda: any(line.startswith("STATUS=held: ") for line in service.notifications()))
    assert service.metric("retraind_queue_held") == 1
    assert service.jobs() == []
    assert (service.incoming / GOOD).exists()
    assert service.get("/-/ready") == "ready\n", "an operator's wish is no fault"
    assert "the queue is held" in obey(service, "jobs") or "no jobs yet" in obey(service, "jobs")
    assert "held: nothing is started" in service.command("status").stdout
    assert "the queue is held already" in obey(service, "hold", "--all")
    assert obey(service, "release", "--all") == "the queue is released\n"
    service.wait_for_state(GOOD, "published")
    eventually(lambda: service.metric("retraind_queue_held") == 0)


def test_a_held_queue_lets_the_running_job_end(service: Service) -> None:
    run_one(service)
    obey(service, "hold", "--all")
    service.drop(GOOD)
    eventually(lambda: "the queue is held" in str(service.status()["text"]))
    let_go(service)
    service.wait_for_state(RUNNING, "published")
    eventually(lambda: service.status()["state"] == "held")
    assert service.trained() == [RUNNING]


def test_a_running_job_that_is_held_goes_back_at_no_cost_and_the_others_pass_it(service: Service) -> None:
    job_id = run_one(service)
    assert "stops at the next safe point" in obey(service, "hold", job_id)
    job = service.wait_for_state(RUNNING, "queued")
    assert (job["attempts"], job["num_interruptions"]) == (0, 0)
    service.drop(GOOD)
    service.wait_for_state(GOOD, "published")
    assert service.trained() == [RUNNING, GOOD]
    assert service.metric("retraind_jobs_held") == 1
    eventually(lambda: f"held: {RUNNING} waits for `retraind release {job_id}`" == service.status()["text"])
    assert "queued, held" in obey(service, "jobs")
    assert {job["id"]: job["held"] for job in json.loads(obey(service, "jobs", "--json"))}[job_id] is True
    let_go(service)
    assert obey(service, "release", job_id) == f"{job_id}: released\n"
    job = service.wait_for_state(RUNNING, "published")
    assert job["attempts"] == 1
    assert service.metric("retraind_jobs_held") == 0


def test_a_job_that_waits_for_another_attempt_can_be_held(make_service) -> None:
    service = make_service().start()
    service.drop("host.csv")
    job_id = str(service.wait_for_state("host.csv", "deferred")["id"])
    obey(service, "hold", job_id)
    service.drop(GOOD)
    service.wait_for_state(GOOD, "published")
    assert "host.csv" not in service.trained()[service.trained().index(GOOD) :]
    (service.spool / "healed").touch()
    obey(service, "release", "--all")
    service.wait_for_state("host.csv", "published")


@pytest.mark.parametrize("held", ["the job", "the queue"])
def test_kill_9_between_a_hold_and_its_effect_takes_nothing_back(service: Service, held: str) -> None:
    job_id = run_one(service)
    worker = (
        Path("/proc") / Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children").read_text().strip()
    )
    service.signal(signal.SIGSTOP)  # the service can not have seen the hold
    obey(service, "hold", job_id if held == "the job" else "--all")
    service.kill()
    eventually(lambda: not worker.exists(), "the worker died with the service")
    let_go(service)
    service.start()
    assert service.states() == {RUNNING: "queued"}
    service.drop(GOOD)
    if held == "the job":
        service.wait_for_state(GOOD, "published")
        assert service.trained() == [RUNNING, GOOD]
    else:
        eventually(lambda: service.metric("retraind_spool_files", state="incoming_ready") == 1)
        eventually(lambda: service.status()["state"] == "held")
        assert service.trained() == [RUNNING]
    obey(service, "release", "--all")
    job = service.wait_for_state(RUNNING, "published")
    assert job["attempts"] == 1
    service.wait_for_state(GOOD, "published")


def test_a_hold_lasts_over_restarts_and_can_be_placed_and_lifted_while_the_service_is_down(service: Service) -> None:
    job_id = run_one(service)
    assert service.stop() == 0
    obey(service, "hold", job_id)
    for _ in range(2):
        service.start()
        eventually(lambda: service.status()["state"] == "held")
        assert service.stop() == 0
    assert service.trained() == [RUNNING]
    obey(service, "release", job_id)
    let_go(service)
    service.start()
    service.wait_for_state(RUNNING, "published")


def test_the_hold_of_a_job_that_ended_all_the_same_is_forgotten(service: Service) -> None:
    job_id = run_one(service)
    service.signal(signal.SIGSTOP)
    obey(service, "hold", job_id)
    let_go(service)
    candidate = service.state / "jobs" / job_id / "work" / "candidate.json"
    eventually(candidate.exists, "the worker is done before the service knows of the hold")
    service.signal(signal.SIGCONT)
    service.wait_for_state(RUNNING, "published")
    eventually(lambda: not list((service.state / "holds").iterdir()))
    assert "held" not in obey(service, "jobs")


def test_what_can_not_be_held_or_released_is_named(service: Service) -> None:
    service.drop(GOOD)
    job_id = str(service.wait_for_state(GOOD, "published")["id"])
    for words, reason in (
        (("hold", "20261201T000000Z-ffff"), "not_found: job 20261201T000000Z-ffff is not known"),
        (("hold", "../../elsewhere"), "not_found: job ../../elsewhere is not known"),
        (("hold", "queue"), "not_found: job queue is not known"),
        (("release", "20261201T000000Z-ffff"), "not_found: job 20261201T000000Z-ffff is not known"),
        (("hold", job_id), f"bad_argument: job {job_id} has ended: it is published"),
        (("release", job_id), f"bad_argument: job {job_id} is published and not held"),
    ):
        done = service.command(*words)
        assert (done.returncode, done.stdout) == (64, "")
        assert reason in done.stderr
    assert obey(service, "release", "--all") == "the queue was not held\n"
    assert not (service.state / "holds").exists() or not list((service.state / "holds").iterdir())


def test_before_there_is_a_state_directory_nothing_can_be_held(make_service) -> None:
    service = make_service()
    done = service.command("hold", "--all")
    assert done.returncode == 69
    assert f"{service.state} is not there" in done.stderr


@pytest.fixture
def foreign_state() -> Iterator[Path]:
    """A state directory of the user nobody, below directories that everybody may enter."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a directory of another user")
    root = Path(tempfile.mkdtemp(prefix="retraind-test-"))
    root.chmod(0o755)
    (root / "state").mkdir(mode=0o750)
    os.chown(root / "state", 65534, 65534)
    yield root
    shutil.rmtree(root)


def test_what_root_holds_belongs_to_the_service(foreign_state: Path) -> None:
    config = foreign_state / "retraind.yaml"
    config.write_text("spool: {dir: spool}\nmodels: {dir: models}\nstate: {dir: state}\n")
    for verb in ("hold", "release", "hold"):
        command = [sys.executable, "-m", "retraind", verb, "--all", "--config", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    for path, mode in (
        (foreign_state / "state" / "holds", 0o750),
        (foreign_state / "state" / "holds" / "queue", 0o640),
    ):
        assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_root_is_not_led_astray_by_a_link_in_the_state_directory(foreign_state: Path) -> None:
    config = foreign_state / "retraind.yaml"
    config.write_text("spool: {dir: spool}\nmodels: {dir: models}\nstate: {dir: state}\n")
    (foreign_state / "precious").mkdir(mode=0o755)
    (foreign_state / "state" / "holds").symlink_to(foreign_state / "precious")
    command = [sys.executable, "-m", "retraind", "hold", "--all", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 69
    assert "Permission denied" in done.stderr
    assert list((foreign_state / "precious").iterdir()) == []
