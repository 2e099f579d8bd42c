"""The floor of free bytes: when it is met, when it heals, and what is said meanwhile."""

import logging
import os
from pathlib import Path

import pytest

from retraind.supervisor import disks
from retraind.supervisor.disks import Disks, ask, is_low
from retraind.supervisor.faults import Faults
from retraind.supervisor.metrics import Metrics, Space


@pytest.mark.parametrize(
    ("free", "floor", "was_low", "low"),
    [
        (99, 100, False, True),
        (100, 100, False, False),
        (100, 100, True, True),  # a tenth more before it goes on
        (109, 100, True, True),
        (110, 100, True, False),
        (0, 0, False, False),
        (0, 0, True, False),  # switched off while it was low
    ],
)
def test_a_floor_is_left_at_once_and_reached_again_with_a_tenth_more(
    free: int, floor: int, *, was_low: bool, low: bool
) -> None:
    assert is_low(free, floor, was_low=was_low) is low


def test_a_filesystem_is_asked_for_what_a_user_can_write(tmp_path: Path) -> None:
    space = ask(tmp_path)
    assert space is not None
    assert space.size == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert 0 < space.free <= space.size
    assert ask(tmp_path / "gone") is None


def test_room_for_a_job_is_a_little_and_the_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, floor, has_room in ((2**26, 0, True), (2**26 - 1, 0, False), (2**26, 2**26 + 1, False)):
        monkeypatch.setattr(disks, "ask", lambda _, free=free: Space(free, 2**40))
        assert disks.has_room(tmp_path, floor) is has_room
    monkeypatch.setattr(disks, "ask", lambda _: None)
    assert not disks.has_room(tmp_path, 0)


class Machine:
    """Three filesystems whose free bytes the test decides; None is one that can not be asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free: dict[str, int | None] = {"spool": 200, "models": 200, "state": 200}
        self.metrics = Metrics()
        self.faults = Faults(self.metrics)
        self.disks = Disks({name: Path("/") / name for name in self.free}, self.faults, self.metrics)
        self.now = 0.0
        monkeypatch.setattr(disks, "ask", self._ask)

    def _ask(self, path: Path) -> Space | None:
        free = self.free[path.name]
        return None if free is None else Space(free, 1000)

    def look(self, floor: int = 100) -> list[str]:
        self.now += 10
        self.disks.look(self.now, floor)
        return list(self.faults.texts)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("name", ["spool", "models", "state"])
def test_one_low_filesystem_keeps_jobs_from_being_started_until_it_has_room(name: str, machine: Machine) -> None:
    assert machine.look() == []
    machine.free[name] = 99
    assert machine.look() == ["low_disk"]
    assert machine.faults.is_blocking
    assert f"/{name}" in machine.faults.texts["low_disk"]
    machine.free[name] = 105
    assert machine.look() == ["low_disk"]
    machine.free[name] = 110
    assert machine.look() == []


def test_a_moving_figure_is_logged_once(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for free in (90, 80, 70, 95):
        machine.free["state"] = free
        machine.look()
    assert len(caplog.records) == 1
    machine.free["spool"] = 1
    machine.look()
    assert len(caplog.records) == 2, "another filesystem is news"


def test_one_that_can_not_be_asked_is_not_called_low(machine: Machine) -> None:
    machine.free["models"] = 1
    assert machine.look() == ["low_disk"]
    machine.free["models"] = None
    assert machine.look() == []
    assert machine.metrics.registry.get_sample_value("retraind_disk_free_bytes", {"directory": "models"}) is None


def test_a_floor_of_nothing_is_no_floor_and_a_new_one_counts_at_once(machine: Machine) -> None:
    machine.free["models"] = 0
    assert machine.look() == ["low_disk"]
    assert machine.look(floor=0) == []


def test_the_filesystems_are_not_asked_in_every_turn(machine: Machine) -> None:
    machine.look()
    machine.free["models"] = 1
    machine.disks.look(machine.now + 0.1, 100)
    assert machine.faults.texts == {}
