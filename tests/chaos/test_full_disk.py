"""A real filesystem, filled to its last byte while jobs are at work, and freed again: the machine's fault alone."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from accounts import Accounts, settle
from full_disk import SmallDisk
from harness import Service, eventually

# In every run of the suite on ext4, four times each; the long form fills both kinds ten times.
IS_LONG = bool(os.environ.get("CHAOS_LONG"))
NUM_FILLS = 10 if IS_LONG else 4


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[str, str], SmallDisk]]:
    made: list[SmallDisk] = []

    def make(name: str, kind: str) -> SmallDisk:
        made.append(SmallDisk(tmp_path / name, kind, num_mib=4))
        return made[-1]

    yield make
    for disk in made:
        disk.close()


def place(root: Path, full: str) -> dict[str, dict[str, str]]:
    """Which of the three directories lie on the small disk."""
    names = ("spool", "state", "models")
    return {name: {"dir": str(root / "disk" / name)} for name in names if full in (name, "all three")}


def service_on(make_service: Callable[..., Service], root: Path, full: str) -> Service:
    sections = place(root, full)
    service = make_service(**sections)
    for name, section in sections.items():
        setattr(service, name, Path(section["dir"]))
    service.incoming = service.spool / "incoming"
    # What is counted there must not need room there.
    service.spool.mkdir(parents=True, exist_ok=True)
    (root / "trained.log").touch()
    (service.spool / "trained.log").symlink_to(root / "trained.log")
    return service


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "tmpfs"] if IS_LONG else ["ext4"])
@pytest.mark.parametrize("full", ["spool", "state", "models", "all three"])
def test_a_disk_that_is_filled_again_and_again_during_jobs_costs_no_attempt_and_no_dataset(
    make_service, make_disk, tmp_path: Path, full: str, kind: str
) -> None:
    rng, accounts = random.Random(f"{full} {kind}"), Accounts()
    disk = make_disk("disk", kind)
    service = service_on(make_service, tmp_path, full).start()
    moment = threading.Event()  # never set: a seeded time in the life of a job
    for number in range(NUM_FILLS):
        for name in (f"slow-{number}.csv", f"{number}.csv"):
            data = f"{name} ".encode() * 100
            accounts.note(data)
            target = service.incoming / f".{name}"
            target.write_bytes(data)
            target.rename(service.incoming / name)
        eventually(lambda number=number: len(service.trained()) > number, "a job of this round")
        moment.wait(rng.uniform(0.0, 0.6))
        disk.fill()
        moment.wait(rng.uniform(0.1, 0.6))
        assert service.process.poll() is None, "the service goes on"
        disk.free()
    settle(service, seconds=180)
    accounts.check(service)
    assert service.process.poll() is None
    assert os.listdir(service.spool / "quarantine") == []
    assert {str(job["name"]): job["attempts"] for job in service.jobs() if job["attempts"] != 1} == {}
    eventually(lambda: service.metric("retraind_ready") == 1, "every fault is over")
