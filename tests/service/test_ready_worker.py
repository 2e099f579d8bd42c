"""The worker that is kept ready: one job takes it, nothing that becomes of it costs a job more than a cold start."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Service, eventually

READY, LOST = "retraind_worker_ready", "retraind_worker_ready_lost_total"


def children(service: Service) -> list[int]:
    pid = service.process.pid
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def waiting(service: Service) -> int:
    """The process that waits for a job, once it is ready."""
    eventually(lambda: service.metric(READY) == 1, "a worker that is ready")
    (pid,) = children(service)
    return pid


def publish(service: Service, name: str) -> None:
    """The dataset is published by its first attempt."""
    service.drop(name)
    assert service.wait_for_state(name, "published")["attempts"] == 1
    assert service.trained().count(name) == 1


def test_a_job_takes_the_worker_that_waits_and_the_next_one_is_another(service: Service) -> None:
    first = waiting(service)
    eventually(lambda: service.status()["is_worker_ready"], "the status tells it")
    assert "worker ready" in service.command("status").stdout
    service.drop("hold.csv")
    eventually(lambda: "epoch" in str(service.status()["text"]), "a job at work")
    assert children(service) == [first], "nothing waits beside a worker that has a job"
    assert service.metric(READY) == 0
    eventually(lambda: service.status()["is_worker_ready"] is False)
    (service.spool / "release").touch()
    service.wait_for_state("hold.csv", "published")
    second = waiting(service)
    assert second != first
    assert not is_alive(first), "one process a job"
    assert service.metric(LOST) == 0


@pytest.mark.parametrize("mishap", ["broken", "leaves"])
def test_one_that_ends_before_its_job_begins_costs_no_attempt(make_service: Callable, mishap: str) -> None:
    service = make_service().start(RETRAIND_FAKE_READY=mishap)
    eventually(lambda: service.metric(READY if mishap == "leaves" else LOST) == 1)
    publish(service, "a.csv")
    assert service.metric(LOST) >= 1
    assert service.metric("retraind_worker_exits_total", reason="finished") == 1


def test_one_that_was_killed_is_noticed_and_replaced(service: Service) -> None:
    first = waiting(service)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: service.metric(LOST) == 1, "it is noticed")
    assert waiting(service) != first
    publish(service, "a.csv")


def test_one_that_is_killed_while_the_service_does_not_look_costs_nothing(service: Service) -> None:
    """The order may find a process that is gone, though nobody has noticed yet."""
    first = waiting(service)
    service.signal(signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    service.drop("a.csv")
    service.signal(signal.SIGCONT)
    assert service.wait_for_state("a.csv", "published")["attempts"] == 1


@pytest.mark.slow  # it is given ten seconds to begin
@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_one_that_does_not_begin_is_ended_and_costs_no_attempt(make_service: Callable, how: str) -> None:
    service = make_service().start(RETRAIND_FAKE_READY=how)
    first = waiting(service)
    if how == "stopped":
        os.kill(first, signal.SIGSTOP)
    publish(service, "a.csv")
    assert not is_alive(first)
    assert service.metric(LOST) == 1


def test_a_stop_does_not_wait_for_one_that_does_not_begin_and_its_job_goes_on_later(make_service: Callable) -> None:
    service = make_service(worker={"stop_seconds": 1.0}).start(RETRAIND_FAKE_READY="stuck")
    first = waiting(service)
    os.kill(first, signal.SIGSTOP)  # so that it does not hear SIGTERM either
    service.drop("a.csv")
    eventually(lambda: service.states().get("a.csv") == "running")
    assert service.stop() == 0
    assert not is_alive(first)
    assert [(job["state"], job["attempts"]) for job in service.jobs()] == [("queued", 0)]
    service.start()
    service.wait_for_state("a.csv", "published")


def test_none_is_kept_when_none_is_wanted(make_service: Callable) -> None:
    service = make_service(worker={"keep_ready_seconds": 0}).start()
    publish(service, "a.csv")
    assert service.metric(READY) == 0
    assert children(service) == []


def test_one_ends_when_no_file_comes_and_begins_again_while_one_settles(make_service: Callable) -> None:
    service = make_service(worker={"keep_ready_seconds": 0.5}, intake={"quiet_seconds": 3.0}).start()
    eventually(lambda: service.metric(READY) == 0 and not children(service) and service.status()["state"] == "idle")
    assert service.metric(LOST) == 0, "it was ended, not lost"
    service.drop("a.csv")
    waiting(service)
    assert service.states() == {}, "the file still settles"
    assert service.wait_for_state("a.csv", "published")["attempts"] == 1


def test_another_interpreter_replaces_it_at_the_reload_and_none_ends_it(service: Service) -> None:
    first = waiting(service)
    other = service.root / "other-python"
    other.write_text((service.root / "fake-python").read_text())
    other.chmod(0o755)
    service.settings["worker"]["python"] = str(other)
    service.write_config()
    service.signal(signal.SIGHUP)
    eventually(lambda: not is_alive(first), "the old interpreter's is ended")
    second = waiting(service)
    publish(service, "a.csv")
    assert not is_alive(second)
    third = waiting(service)
    service.settings["worker"]["keep_ready_seconds"] = 0
    service.write_config()
    service.signal(signal.SIGHUP)
    eventually(lambda: not is_alive(third))
    assert service.metric(LOST) == 0


def test_none_begins_while_the_queue_is_held(make_service: Callable) -> None:
    service = make_service(worker={"keep_ready_seconds": 0.5}).start()
    assert service.command("hold", "--all").returncode == 0
    service.drop("a.csv")
    eventually(lambda: service.status()["num_ready"] == 1 and not children(service), "its time is over")
    assert service.command("release", "--all").returncode == 0
    service.wait_for_state("a.csv", "published")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_service(service: Service, end: int) -> None:
    pid = waiting(service)
    service.signal(end)
    assert service.wait() == (0 if end == signal.SIGTERM else -signal.SIGKILL)
    if end == signal.SIGTERM:
        assert not is_alive(pid), "the service saw to it"
    eventually(lambda: not is_alive(pid), "no orphan")
