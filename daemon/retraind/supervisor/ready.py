"""The worker that is kept ready: a process that has imported what a job needs, and waits for one order.

Holds at most one, until a job takes it, nothing has been expected for worker.keep_ready_seconds, the interpreter is
another one, or it ends by itself. It has no job, so whatever becomes of it costs a job no more than the imports. Never
blocks for longer than the end of a killed process takes. Raises nothing.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

from retraind.config import WorkerConfig
from retraind.events import READY_ARGUMENT, READY_LINE
from retraind.supervisor import program, schedule
from retraind.supervisor.metrics import Metrics

log = logging.getLogger(__name__)

WORKER_DIR = Path(__file__).resolve().parent.parent / "worker"
# From an order to the first event. It has nothing to do but to read it: longer than pages take to come back from swap.
_ANSWER_SECONDS = 10.0
# While it still imports, which takes up to 15 s on a busy machine and would have to be done again.
_IMPORT_SECONDS = 45.0
# After SIGKILL a process is gone at once, unless a driver holds it; then the kernel keeps it, and nothing waits for it.
_REAP_SECONDS = 1.0


def interpreter(config: WorkerConfig) -> str:
    """The one that runs workers."""
    return sys.executable if config.python == "auto" else config.python


def spawn(python: str, argument: str, channel: socket.socket | None = None) -> subprocess.Popen[bytes]:
    """Starts a worker; standard input is the channel, or empty. Raises OSError."""
    return subprocess.Popen(
        [python, "-s", str(WORKER_DIR), argument],
        stdin=subprocess.DEVNULL if channel is None else channel.fileno(),
        env=program.environment(),
        cwd="/",
    )


class Waiting:
    """One process without a job."""

    def __init__(self, python: str) -> None:
        """Starts it. Raises OSError."""
        self.python = python
        self.is_ready = False
        self.channel, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = spawn(python, READY_ARGUMENT, theirs)
        except OSError:
            self.channel.close()
            raise
        self.channel.setblocking(False)

    def has_ended(self) -> bool:
        """Hears what it says, which is that it is ready, or its end."""
        try:
            said = self.channel.recv(len(READY_LINE))
        except BlockingIOError:
            return False
        except OSError:
            return True
        self.is_ready = self.is_ready or said == READY_LINE
        return not said

    def take_order(self, path: Path) -> bool:
        """Gives it its one order; False when it can not take one any more."""
        try:
            if self.has_ended():
                return False
            self.channel.sendall(os.fsencode(path) + b"\n")  # whole or not at all: a path is no burden for a socket
        except OSError:
            return False
        self.channel.close()
        return True


class ReadyWorker:
    """At most one, for the next job. `tend` in every turn of the loop; `take` for a job; `close` at the end."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: Waiting | None = None
        self._ending: list[subprocess.Popen[bytes]] = []
        self._expected_at = float("-inf")
        self._start_at = 0.0
        self._num_lost = 0

    @property
    def is_ready(self) -> bool:
        """Whether the next job finds its imports done."""
        return self._waiting is not None and self._waiting.is_ready

    def expect(self, now: float) -> None:
        """There is reason to think that a job will come within worker.keep_ready_seconds."""
        self._expected_at = now

    def tend(self, config: WorkerConfig, now: float, *, may_start: bool) -> None:
        """Starts one when one is wanted and none is there, ends one that is not wanted any more."""
        self._reap()
        waiting, python = self._waiting, interpreter(config)
        is_wanted = now < self._expected_at + config.keep_ready_seconds
        if waiting is not None and waiting.has_ended():
            self._end()
            self.lost(now)
        elif waiting is not None and (not is_wanted or waiting.python != python):
            self._end()
        if is_wanted and may_start and self._waiting is None and now >= self._start_at:
            try:
                self._waiting = Waiting(python)
            except OSError as error:  # a job will say it, and wait for it to heal
                log.debug("%s: %s", python, error.strerror)
                self.lost(now)
        self._metrics.worker_ready(self.is_ready)

    def take(self, python: str, order_path: Path, now: float) -> tuple[subprocess.Popen[bytes], float] | None:
        """Gives the order to the one that waits: its process, from here on the job's own, and when it must have spoken.

        None when there is none for this interpreter, or it is gone.
        """
        waiting = self._waiting
        if waiting is None or waiting.python != python:
            return None
        if not waiting.take_order(order_path):
            self._end()
            self.lost(now)
            return None
        self._waiting = None
        self._metrics.worker_ready(False)
        return waiting.process, now + (_ANSWER_SECONDS if waiting.is_ready else _IMPORT_SECONDS)

    def answered(self) -> None:
        """The one that was taken began on its job: whatever ended those before it is over."""
        self._num_lost, self._start_at = 0, 0.0

    def lost(self, now: float) -> None:
        """One is gone before it began on a job: the next one is tried after a pause that grows."""
        self._num_lost += 1
        pause = schedule.backoff(self._num_lost)
        self._start_at = now + pause
        self._metrics.ready_worker_lost()
        log.info("the worker that was kept ready is gone: the next job starts its own; another try in %.0f s", pause)

    def fds(self) -> list[int]:
        """What to wait on: its channel, which says that it is ready or gone."""
        return [] if self._waiting is None else [self._waiting.channel.fileno()]

    def next_deadline(self, config: WorkerConfig, now: float) -> float | None:
        """The monotonic time at which `tend` has something to do; None when that is nothing."""
        until = self._expected_at + config.keep_ready_seconds
        if self._waiting is not None:
            return until
        return self._start_at if now < self._start_at < until else None

    def _end(self) -> None:
        """Ends it at once: it has nothing to lose."""
        if self._waiting is not None:
            self._waiting.channel.close()
            self._waiting.process.kill()
            self._ending.append(self._waiting.process)
            self._waiting = None

    def _reap(self) -> None:
        self._ending = [process for process in self._ending if process.poll() is None]

    def close(self) -> None:
        """Ends it and waits for its end, for as long as that may take."""
        self._end()
        for process in self._ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_SECONDS)
