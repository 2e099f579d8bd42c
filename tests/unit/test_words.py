"""What is said: the status line, and what systemd is told."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import NOW

from retraind import events
from retraind.supervisor import status
from retraind.supervisor.systemd import Systemd


@pytest.mark.parametrize(
    ("stage", "event", "words"),
    [
        ("", None, "starting on a.csv"),
        ("preflight", events.Stage(name="preflight"), "checking the machine for a.csv"),
        ("ingest", events.Heartbeat(done_share=0.454), "reading a.csv: 45%"),
        ("ingest", events.Heartbeat(), "reading a.csv"),
        ("import", events.Heartbeat(), "loading torch for a.csv"),
        ("train", events.Resumed(epoch=3, epochs=5, num_steps=41), "training a.csv: epoch 3/5"),
        ("train", events.Checkpointed(epoch=3, epochs=5, num_steps=42, num_bytes=9), "training a.csv: epoch 3/5"),
        ("unheard-of", events.Heartbeat(done_share=1.0), "unheard-of a.csv: 100%"),
    ],
)
def test_each_stage_has_its_words(stage: str, event: events.Event | None, words: str) -> None:
    assert status.describe_work("a.csv", stage, event) == words


@pytest.mark.parametrize(
    ("loss", "speed", "left", "words"),
    [
        (0.74131, 512_345.0, 8.2, "epoch 3/5, loss 0.7413, 512k rows/s, 8 s left"),
        (None, 1_330_000.0, 125.0, "epoch 3/5, 1.33M rows/s, 2 min left"),
        (1e-5, 950.0, 9000.0, "epoch 3/5, loss 0.0000, 950 rows/s, 2.5 h left"),
        (2.0, 0.0, 0.0, "epoch 3/5, loss 2.0000, 0 s left"),
    ],
)
def test_progress_reads_as_a_person_would_say_it(loss: float | None, speed: float, left: float, words: str) -> None:
    event = events.Progress(epoch=3, epochs=5, loss=loss, rows_per_second=speed, seconds_left=left, device="cpu")
    assert status.describe_work("a.csv", "train", event) == f"training a.csv: {words}"


def test_the_queue_and_the_next_try_are_tails_that_are_empty_when_there_is_nothing_to_say() -> None:
    assert [status.waiting(number) for number in (0, 1, 2)] == ["", "; 1 file waiting", "; 2 files waiting"]
    assert [status.next_try(pause) for pause in (-1.0, 0.0, 4.0)] == ["", "", "; next try in 4 s"]


def test_a_status_is_read_back_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    told = status.Status(state="idle", text="idle", updated_at=NOW, faults={"disk": "full"})
    status.write(tmp_path, told)
    assert status.read(tmp_path) == told
    for data in (b"", b"{", b"\xff", b"{}"):
        (tmp_path / status.STATUS_FILE).write_bytes(data)
        assert status.read(tmp_path) is None
    assert status.read(tmp_path / "nowhere") is None


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    """Systemd's end of the notify socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


@pytest.fixture
def connect() -> Iterator[Callable[[], Systemd]]:
    """Makes the service's end, when the environment is as the test wants it."""
    made: list[Systemd] = []

    def make() -> Systemd:
        made.append(Systemd())
        return made[-1]

    yield make
    for systemd in made:
        systemd.close()


def test_the_same_status_is_told_once(manager: socket.socket, connect: Callable[[], Systemd]) -> None:
    systemd = connect()
    for text in ("idle", "idle", "training", "idle"):
        systemd.status(text)
    systemd.ready()
    told = [manager.recv(1000).decode() for _ in range(4)]
    assert told == ["STATUS=idle", "STATUS=training", "STATUS=idle", "READY=1"]


def test_the_watchdog_is_answered_at_a_third_of_its_time(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, connect: Callable[[], Systemd]
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    systemd = connect()
    assert systemd.ping_seconds == 10
    for now in (100.0, 109.9, 110.0, 119.0, 120.1):
        systemd.watchdog(now)
    systemd.stopping()
    told = [manager.recv(1000).decode() for _ in range(4)]
    assert told == ["WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"]


@pytest.mark.parametrize(("microseconds", "pid"), [("", ""), ("0", ""), ("soon", ""), ("-5", ""), ("30000000", "1")])
def test_a_watchdog_that_is_not_meant_for_us_is_not_answered(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, connect: Callable[[], Systemd], microseconds: str, pid: str
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", microseconds)
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    systemd = connect()
    assert systemd.ping_seconds is None
    systemd.watchdog(1000.0)
    systemd.ready()
    assert manager.recv(1000) == b"READY=1"


def test_a_reload_comes_with_its_monotonic_time(manager: socket.socket, connect: Callable[[], Systemd]) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    connect().reloading()
    first, second = manager.recv(1000).decode().split("\n")
    assert first == "RELOADING=1"
    assert before <= int(second.removeprefix("MONOTONIC_USEC=")) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def test_a_manager_that_does_not_read_holds_nobody_up_for_ever(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, connect: Callable[[], Systemd]
) -> None:
    monkeypatch.setattr("retraind.supervisor.systemd._SEND_SECONDS", 0.002)
    systemd = connect()
    for number in range(600):  # far more than any queue of datagrams
        systemd.status(str(number))
    assert manager.recv(1000) == b"STATUS=0"


def test_without_systemd_nothing_is_told_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[[], Systemd]
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd = connect()
    for tell in (systemd.ready, systemd.reloading, systemd.stopping):
        tell()
    systemd.status("idle")
    systemd.extend_start(30)
