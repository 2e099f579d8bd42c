"""A clock that steps, inode numbers that come back, a directory that is another one, a second service."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from accounts import Accounts, settle, versions
from harness import Service, eventually

DAY = 86_400


def test_a_clock_that_steps_back_and_forth_during_jobs_loses_nothing_and_publishes_once(make_service) -> None:
    service, rng, accounts = make_service(), random.Random(7), Accounts()
    clock = service.root / "clock"

    def set_clock(seconds: float) -> None:
        clock.with_name("clock.new").write_text(str(seconds))
        clock.with_name("clock.new").rename(clock)

    set_clock(0)
    service.program = [str(Path(__file__).with_name("skewed_clock.py"))]
    service.start(CHAOS_CLOCK=str(clock))
    steps = [-50 * 365 * DAY, 3600, -DAY, 20 * 365 * DAY, -1, 0, 40 * DAY, -3600]
    for number, step in enumerate(steps):
        for name in (f"slow-{number}.csv", f"{number}.csv"):
            accounts.note(name.encode())
            service.drop(name)
        eventually(lambda number=number: len(service.trained()) > number, "a job of this round")
        set_clock(step + rng.uniform(-0.5, 0.5))
        if number % 3 == 2:
            service.kill()
            service.start(CHAOS_CLOCK=str(clock))
    settle(service, seconds=60)
    accounts.check(service)
    years = {str(version["published_at"])[:4] for version in versions(service)}
    assert min(years) < "1980", "the service did live in another time"
    assert max(years) > "2040"
    assert os.listdir(service.spool / "quarantine") == []


def _with_inode(number: int, make: Callable[[int], Path]) -> Path:
    """Makes one after the other, and holds them, until one has the inode's number that has become free."""
    held = []
    for attempt in range(2000):
        path = make(attempt)
        if path.stat().st_ino == number:
            break
        held.append(path)
    for other in held:
        other.rmdir() if other.is_dir() else other.unlink()
    if len(held) == 2000:
        pytest.skip("this filesystem does not give an inode's number again, or another process has it now")
    return path


def test_another_file_with_the_name_size_time_and_inode_of_one_that_waited_is_trained_as_it_is(make_service) -> None:
    service, accounts = make_service(intake={"quiet_seconds": 1.0}).start(), Accounts()

    def write(path: Path, text: bytes) -> Path:
        path.write_bytes(text)
        os.utime(path, (1_700_000_000, 1_700_000_000))
        return path

    waiting = write(service.incoming / "a.csv", b"the old")
    number = waiting.stat().st_ino
    eventually(lambda: service.metric("retraind_spool_files", state="incoming_settling") == 1, "it was seen")
    waiting.unlink()
    _with_inode(number, lambda i: write(service.incoming / f".held-{i}", b"the new")).rename(waiting)
    accounts.note(b"the new")
    settle(service, seconds=60)
    accounts.check(service)


def test_an_incoming_that_was_replaced_under_the_same_inode_number_is_watched_again(make_service) -> None:
    service = make_service(intake={"rescan_seconds": 3.0}).start()
    number = service.incoming.stat().st_ino
    shutil.rmtree(service.incoming)

    def make(attempt: int) -> Path:
        path = service.spool / f".held-{attempt}"
        path.mkdir()
        return path

    _with_inode(number, make).rename(service.incoming)
    accounts = Accounts()
    for name in ("a.csv", "b.csv"):
        accounts.note(name.encode())
        service.drop(name)
        service.wait_for_state(name, "published")
    eventually(lambda: service.metric("retraind_watch_mode", mode="inotify") == 1, "inotify again")
    num_events = service.metric("retraind_watch_events_total")
    accounts.note(b"c.csv")
    service.drop("c.csv")
    eventually(lambda: service.metric("retraind_watch_events_total") > num_events, "the new directory is watched")
    settle(service, seconds=60)
    accounts.check(service)


@pytest.mark.parametrize("shared", ["spool", "state", "spool and state"])
def test_a_second_service_on_one_spool_or_state_ends_with_69_and_harms_nothing(
    make_service, tmp_path: Path, shared: str
) -> None:
    service, accounts = make_service().start(), Accounts()
    accounts.note(b"hold.csv")
    service.drop("hold.csv")
    eventually(lambda: "epoch" in str(service.status()["text"]), "a job at work")
    before = service.jobs()
    sections = {name: {"dir": str(getattr(service, name))} for name in ("spool", "state") if name in shared}
    for _ in range(2):
        other = make_service(tmp_path / "other", **sections).start(wait=False)
        assert other.wait() == 69
        assert "already_running" in other.log()
        shutil.rmtree(tmp_path / "other")
    assert service.jobs() == before, "the running job and its record are as they were"
    assert service.process.poll() is None
    (service.spool / "release").touch()
    settle(service, seconds=60)
    accounts.check(service)
    assert service.trained() == ["hold.csv"]


def test_of_services_that_start_at_once_on_one_spool_one_works_and_the_next_takes_over_when_it_is_killed(
    make_service, tmp_path: Path
) -> None:
    accounts = Accounts()
    services: list[Service] = []
    for number in range(4):
        section = {name: {"dir": str(tmp_path / name)} for name in ("spool", "state", "models")}
        services.append(make_service(tmp_path / str(number), **section))
        services[-1].start(wait=False)
    eventually(lambda: sum(one.process.poll() is None for one in services) == 1, "one is left")
    assert sorted(one.process.poll() for one in services if one.process.poll() is not None) == [69, 69, 69]
    first = next(one for one in services if one.process.poll() is None)
    for service in services:
        service.spool, service.state, service.models = (tmp_path / name for name in ("spool", "state", "models"))
        service.incoming = service.spool / "incoming"
    eventually(lambda: "READY=1" in first.notifications(), "it works")
    accounts.note(b"hold.csv")
    first.drop("hold.csv")
    eventually(first.trained, "a job at work")
    first.signal(signal.SIGKILL)
    first.wait()
    (first.spool / "release").touch()
    second = next(one for one in services if one is not first).start()
    settle(second, seconds=60)
    accounts.check(second)
