"""`publish.hook`: the operator's program, run after each change of the live version, at least once.

What is owed stands in <state.dir>/hook.json before the job is written down as published, and is taken out after the
program has run: a crash between the two runs it again. Never blocks: the loop polls `fds` and calls `tend`. A program
that fails or takes too long is a warning and a metric, never an error of a job. Raises OSError when the disk fails.
"""

import contextlib
import logging
import os
import subprocess
from pathlib import Path

import msgspec

from retraind import fsio, typed_json
from retraind.config import PublishConfig
from retraind.supervisor import program
from retraind.supervisor.metrics import Metrics

log = logging.getLogger(__name__)

# A hook that is always slower than the publications must not fill the disk: the oldest are let go.
_MAX_OWED = 100


class Owed(msgspec.Struct, frozen=True, kw_only=True):
    """One run that is owed, as the environment will say it."""

    version: str
    sha256: str
    path: str


class Hook:
    """Runs what is owed, one after the other, oldest first."""

    def __init__(self, state_dir: Path, metrics: Metrics) -> None:
        self._path = state_dir / "hook.json"
        self._metrics = metrics
        self._owed: list[Owed] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._kill_at = 0.0
        self._is_late = False

    @property
    def is_running(self) -> bool:
        """True while a program is at work."""
        return self._process is not None

    def load(self) -> None:
        """Finds what an earlier life of the service owed. Damaged, it is told and nothing is owed."""
        try:
            self._owed = typed_json.decode(self._path.read_bytes(), list[Owed])
        except FileNotFoundError:
            self._owed = []
        except typed_json.Malformed as error:
            log.error("%s is damaged (%s): hooks that were owed are not run", self._path, error)
            self._owed = []

    def owe(self, config: PublishConfig, version: str, sha256: str, path: Path) -> None:
        """When it returns, the run is durable. Owed once more for what is owed already changes nothing."""
        one = Owed(version=version, sha256=sha256, path=str(path))
        if config.hook and one not in self._waiting():
            self._save([*self._owed, one][-_MAX_OWED:])

    def _waiting(self) -> list[Owed]:
        """Those whose program has not been started: the one that runs may have looked before the change."""
        return self._owed[1:] if self.is_running else self._owed

    def _save(self, owed: list[Owed]) -> None:
        fsio.write_atomic(self._path, msgspec.json.encode(owed), mode=0o640)
        self._owed = owed

    def tend(self, config: PublishConfig, now: float) -> None:
        """Ends what is too late, takes note of what ended, starts the next."""
        if self._process is not None:
            self._look_after(self._process, now)
        if self._process is not None or not self._owed:
            return
        if not config.hook:
            self._save([])  # it was taken out of the configuration meanwhile
            return
        one = self._owed[0]
        extra = {"VERSION": one.version, "SHA256": one.sha256, "PATH_OF_VERSION": one.path}
        try:
            self._process = program.spawn(config.hook, extra)
        except OSError as error:
            self._ended("failed", f"{config.hook[0]}: {error.strerror}")
        else:
            self._pidfd = os.pidfd_open(self._process.pid)
            self._kill_at, self._is_late = now + config.hook_timeout_seconds, False

    def _look_after(self, process: subprocess.Popen[bytes], now: float) -> None:
        if process.poll() is None:
            if now >= self._kill_at and not self._is_late:
                self._is_late = True
                program.kill(process)
            return
        self._forget()
        if self._is_late:
            self._ended("timeout", "it took longer than publish.hook_timeout_seconds and was ended")
        elif process.returncode:
            self._ended("failed", f"exit status {process.returncode}")
        else:
            self._ended("ok", "")

    def _ended(self, result: str, problem: str) -> None:
        self._metrics.hook_ran(result)
        if problem:
            log.warning("publish.hook for %s: %s", self._owed[0].version, problem)
        else:
            log.info("publish.hook ran for %s", self._owed[0].version)
        self._save(self._owed[1:])

    def _forget(self) -> None:
        os.close(self._pidfd)
        self._process, self._pidfd = None, -1

    def fds(self) -> list[int]:
        """What to wait on."""
        return [self._pidfd] if self.is_running else []

    def next_deadline(self) -> float | None:
        """When the program is to be ended, None when none runs or it was ended already."""
        return self._kill_at if self.is_running and not self._is_late else None

    def close(self) -> None:
        """The service ends: a program that still runs is ended with it, and stays owed."""
        if self._process is not None:
            program.kill(self._process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            self._forget()
