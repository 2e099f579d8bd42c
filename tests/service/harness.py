"""Drives the real service as a process: its files, signals, notify socket and HTTP endpoint."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import yaml

FAKE_WORKER = Path(__file__).resolve().parent.parent / "fakes" / "worker.py"
# A condition that holds on any working machine long before this; only a broken one waits it out.
DEADLINE_SECONDS = float(os.environ.get("RETRAIND_TEST_DEADLINE", "60"))
T = TypeVar("T")


def eventually(probe: Callable[[], T], what: str = "", seconds: float = DEADLINE_SECONDS) -> T:
    """The first true value of `probe`; fails the test at the deadline."""
    until = time.monotonic() + seconds
    while True:
        value = probe()
        if value:
            return value
        assert time.monotonic() < until, f"did not come true in {seconds:g} s: {what or probe}"
        time.sleep(0.02)  # between two looks, not instead of one


class Service:
    """`retraind serve` below one directory. With `fake` the worker is tests/fakes/worker.py."""

    def __init__(self, root: Path, *, fake: bool = True, **sections: dict[str, object]) -> None:
        self.root = root
        self.config_path = root / "retraind.yaml"
        self.spool, self.models, self.state = root / "spool", root / "models", root / "state"
        self.incoming = self.spool / "incoming"
        self.log_path = root / "service.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.program = ["-m", "retraind"]  # what the interpreter runs
        self.notified: list[str] = []
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # An abstract address: it has no length limit that a test's directory could break, and leaves no file.
        self._notify_name = f"retraind-test-{os.getpid()}-{id(self)}"
        self._notify.bind("\0" + self._notify_name)
        self._collector = threading.Thread(target=self._collect, daemon=True)
        self._collector.start()
        self.settings: dict[str, dict[str, object]] = {
            "spool": {"dir": "spool"}, "models": {"dir": "models"}, "state": {"dir": "state"},
            "metrics": {"listen": "127.0.0.1:0"}, "intake": {"quiet_seconds": 0.1, "rescan_seconds": 0.5},
            "worker": {"stop_seconds": 5.0},
        }  # fmt: skip
        if fake:
            launcher = root / "fake-python"
            launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{FAKE_WORKER}" "$@"\n')
            launcher.chmod(0o755)
            self.settings["worker"]["python"] = str(launcher)
        for section, values in sections.items():
            self.settings.setdefault(section, {}).update(values)
        self.write_config()

    def write_config(self) -> None:
        self.config_path.write_text(yaml.safe_dump(self.settings))

    def start(self, *, wait: bool = True, **environment: str) -> "Service":
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        self.notified.clear()
        self.process = self._spawn({**os.environ, "NOTIFY_SOCKET": "@" + self._notify_name, **environment})
        if wait:
            eventually(lambda: "READY=1" in self.notifications() or self.process.poll() is not None, "READY=1")
            assert self.process.poll() is None, self.log()
            self.find_url()
        return self

    def find_url(self) -> None:
        """Where the endpoint of this life is, from its log."""
        self.url = re.findall(r"metrics at (https?://[^ ]+)/metrics", self.log_path.read_text()[self._log_start :])[-1]

    def _spawn(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-W", "error", *self.program, "serve", "--config", str(self.config_path)],
                stderr=log, stdout=log, stdin=subprocess.DEVNULL, cwd="/", env=environment,
            )  # fmt: skip

    def _collect(self) -> None:
        """Reads all the time, as systemd does: a full socket would hold the service up."""
        while message := self._notify.recv(65536):
            self.notified += message.decode().split("\n")

    def notifications(self) -> list[str]:
        """Everything that was notified since the start, a line each."""
        return self.notified

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        (self.spool / "release").touch() if self.spool.exists() else None
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        # A thread that is left in a read would take messages of the next socket that gets the descriptor's number.
        self._notify.shutdown(socket.SHUT_RD)
        self._collector.join()
        self._notify.close()

    def drop(self, name: str, data: bytes | str = "", mtime: float | None = None) -> Path:
        """As a good producer does: written elsewhere on the filesystem, then renamed in."""
        staged = self.root / f"staged-{name}"
        staged.write_bytes((data.encode() if isinstance(data, str) else data) or name.encode())
        if mtime is not None:
            os.utime(staged, (mtime, mtime))
        target = self.incoming / name
        staged.rename(target)
        return target

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def trained(self) -> list[str]:
        """The names that the fake worker has begun on, in order, one per attempt."""
        path = self.spool / "trained.log"
        return [line.rpartition(" ")[0] for line in path.read_text().splitlines()] if path.exists() else []

    def jobs(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in sorted((self.state / "jobs").glob("*/job.json"))]

    def states(self) -> dict[str, str]:
        """The state of the newest job of each file name."""
        return {str(job["name"]): str(job["state"]) for job in self.jobs()}

    def wait_for_state(self, name: str, state: str) -> dict[str, object]:
        eventually(lambda: self.states().get(name) == state, f"{name} {state}")
        return next(job for job in reversed(self.jobs()) if job["name"] == name)

    def names(self, directory: str) -> list[str]:
        """The data files in done or quarantine."""
        names = (path.name for path in (self.spool / directory).iterdir())
        return sorted(name for name in names if not name.endswith(".reason.json") and not name.startswith("."))

    def reason(self, name: str) -> dict[str, object]:
        """The reason file of a dataset in quarantine, waited for together with the data."""
        eventually(lambda: name in self.names("quarantine"), f"{name} in quarantine")
        return json.loads((self.spool / "quarantine" / f"{name}.reason.json").read_text())

    def live(self) -> dict[str, object] | None:
        path = self.models / "telemetry_autoencoder" / "current" / "manifest.json"
        return json.loads(path.read_text()) if path.exists() else None

    def status(self) -> dict[str, object]:
        return json.loads((self.state / "status.json").read_text())

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()

    def metric(self, name: str, **labels: str) -> float | None:
        """One sample of the exposition, None when it is not there."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.get("/metrics").splitlines():
            head, _, value = line.rpartition(" ")
            found, _, rest = head.partition("{")
            if found == name and wanted <= set(re.findall(r'\w+="[^"]*"', rest)):
                return float(value)
        return None

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "retraind", *arguments, "--config", str(self.config_path)],
            capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False,
        )  # fmt: skip
