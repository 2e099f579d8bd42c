"""Ten minutes on saturated processors: the watchdog must not take a busy machine for a hung loop.

Starts first and is looked at last: the other tests run in between, which makes the machine busier still.
"""

import os
import time
from collections.abc import Callable

import pytest
from installed import ENDLESS, Service, rows

BUSY_SECONDS = 600


class Busy:
    """A machine on which a job trains while every processor is wanted by others."""

    def __init__(self, service: Service) -> None:
        self.service = service
        service.configure(training=ENDLESS, worker={"max_seconds": 1e6})
        service.restart()
        service.says("^idle")
        for number in range(os.cpu_count() or 1):
            service.shell(f"systemd-run --quiet --unit=hog-{number} sh -c 'while :; do :; done'")
        service.drop("busy.csv", rows())
        self.pid = service.main_pid
        self.since = time.monotonic()

    def seconds_left(self) -> float:
        return BUSY_SECONDS - (time.monotonic() - self.since)


@pytest.fixture(scope="session")
def busy(install: Callable[[str], Service]) -> Busy:
    return Busy(install("busy"))


def test_a_job_begins_on_a_machine_whose_processors_are_taken(busy: Busy) -> None:
    busy.service.says("^training busy.csv: epoch", 600)


@pytest.mark.last
def test_ten_minutes_later_no_watchdog_has_struck_and_the_same_job_still_trains(busy: Busy) -> None:
    service = busy.service
    service.machine.wait(lambda: busy.seconds_left() <= 0, "ten minutes are over", BUSY_SECONDS + 60)
    assert (service.main_pid, service.show("NRestarts")) == (busy.pid, "0")
    assert service.show("WatchdogUSec") == "1min"
    assert "Watchdog timeout" not in service.journal()
    assert service.job("busy.csv")["attempts"] == 1
    before = service.says("^training busy.csv: epoch")
    service.machine.wait(lambda: service.show("StatusText") != before, "it trains on")
    assert service.scrape()["retraind_ready"] == 1
    service.shell("systemctl stop retraind")
    assert service.show("Result") == "success"
    service.shell("systemctl stop 'hog-*'")
