"""Lives of the real service that end at a chosen call: each one a fork of a zygote, below a directory of its own."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import launcher
from harness import DEADLINE_SECONDS, FAKE_WORKER, Service, eventually

ROOT = Path(__file__).resolve().parent.parent.parent
# With this every point is tried; without it a seeded sample of them, which `make test` can afford.
ALL_POINTS = os.environ.get("RETRAIND_FAULTS") == "all"
SEED = int(os.environ.get("RETRAIND_FAULTS_SEED", "20"))
# The lives that go on at once. They mostly wait for fsync and for each other.
NUM_LANES = 2
Item = TypeVar("Item")
# A line in the status file comes when it comes: a series of points that repeats can not count on it.
STATUS = r"state/\.?status\.json"
JOB_ID = r"\d{8}T\d{6}Z-[0-9a-f]{4}"


class Zygote:
    """A process with the service's modules loaded; one life at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", launcher.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def start(self, **order: Any) -> "Forked":
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return Forked(int(self._process.stdout.readline()), self._process.stdout)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Forked:
    """A process that the zygote started, with what the harness needs of a Popen."""

    def __init__(self, pid: int, answers: Any) -> None:
        self.pid, self.returncode = pid, None
        self._answers = answers

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float = DEADLINE_SECONDS) -> int:
        status = self._ended(timeout)
        assert status is not None, f"process {self.pid} did not end in {timeout:g} s"
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, seconds: float) -> int | None:
        if self.returncode is None and select.select([self._answers], [], [], seconds)[0]:
            self.returncode = int(self._answers.readline())
        return self.returncode


class Life(Service):
    """`retraind serve` below one directory, started by a zygote, under a plan for its disk or its worker's."""

    def __init__(self, root: Path, zygote: Zygote, **sections: dict[str, object]) -> None:
        quick = {"intake": {"quiet_seconds": 0, "rescan_seconds": 0.2}, **sections}
        super().__init__(root, **quick)
        self.calls_path = root / "calls.log"
        self._zygote = zygote
        self._plan: dict[str, Any] = {}
        python = root / "fake-python"
        python.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -S -E "{launcher.__file__}" --worker "{FAKE_WORKER}" "$@"\n'
        )

    def begin(self, *, wait: bool = False, worker: dict[str, Any] | None = None, **plan: Any) -> "Life":
        """Starts with this plan for the service's disk, or for the worker's; with neither nothing is tampered with."""
        facts = {"root": str(self.root), "log": str(self.calls_path)}
        self._plan = {**facts, **plan} if plan else {}
        environment = {launcher.PLAN: json.dumps({**facts, **worker})} if worker else {}
        self.start(wait=wait, **environment)
        return self

    def _spawn(self, environment: dict[str, str]) -> Any:
        return self._zygote.start(
            arguments=["serve", "--config", str(self.config_path)],
            environment=environment, output=str(self.log_path), plan=self._plan,
        )  # fmt: skip

    def calls(self) -> list[dict[str, Any]]:
        """What the launcher has written down so far."""
        return (
            [json.loads(line) for line in self.calls_path.read_text().splitlines()] if self.calls_path.exists() else []
        )

    def struck(self) -> list[str]:
        return [call["struck"] for call in self.calls() if "struck" in call]

    def put(self, name: str, data: bytes) -> None:
        """A dataset in incoming/ of a service that does not run."""
        self.incoming.mkdir(parents=True, exist_ok=True)
        (self.incoming / name).write_bytes(data)
        os.utime(self.incoming / name, (1_700_000_000 + len(list(self.incoming.iterdir())),) * 2)

    def is_settled(self) -> bool:
        """True when nothing waits, nothing is owed, and the service says so."""
        try:
            busy = any(self.incoming.iterdir()) or any((self.spool / "active").iterdir())
            return not busy and self.status()["state"] == "idle" and not self.status()["faults"]
        except (OSError, ValueError):
            return False

    def settle(self) -> None:
        eventually(lambda: self.is_settled() or self.process.poll() is not None, "a service that is idle again")
        assert self.process.poll() is None, f"the service ended with {self.process.poll()}\n{self.log()[-3000:]}"


def generic(path: str) -> str:
    """A path as a pattern for the same step of another life: ids, numbers and digests replaced."""
    pattern = re.escape(re.sub(rf"{JOB_ID}", "JOB", path))
    pattern = re.sub(r"\\\.new\\-\d{6}\\-[0-9a-f]{12}\\-[0-9a-f]{8}", r"\\.new-[^/]*", pattern)
    pattern = re.sub(r"\d{6}\\-[0-9a-f]{12}", r"\\d{6}-[0-9a-f]{12}", pattern)
    return pattern.replace("JOB", JOB_ID)


def in_lanes(items: list[Item], run: Callable[[Item, Zygote], None]) -> int:
    """Every item once, NUM_LANES at a time, each lane with a zygote; all failures in one."""
    zygotes = threading.local()
    made: list[Zygote] = []
    failures: list[str] = []

    def one(item: Item) -> None:
        if not hasattr(zygotes, "mine"):
            zygotes.mine = Zygote()
            made.append(zygotes.mine)
        try:
            run(item, zygotes.mine)
        except Exception as error:  # noqa: BLE001  (told together)
            failures.append(f"{str(item)[:60]}: {type(error).__name__}: {str(error)[:2000]}")

    with ThreadPoolExecutor(NUM_LANES) as lanes:
        list(lanes.map(one, items))
    for zygote in made:
        zygote.close()
    assert not failures, f"{len(failures)} of {len(items)}:\n" + "\n".join(failures[:8])
    return len(items)


@contextmanager
def living(root: Path, zygote: Zygote, **sections: dict[str, object]) -> Iterator[Life]:
    """A life below `root`; its process ends and its tree goes with the block, so that a thousand of them fit."""
    root.mkdir(parents=True, exist_ok=True)
    life = Life(root, zygote, **sections)
    try:
        yield life
    except BaseException:
        life.close()
        raise
    life.close()
    shutil.rmtree(root)
