"""One attempt of one job as a process: spawn, events, deadlines, signals, reap.

The only place that starts, signals or reaps a worker. Events are believed only from this attempt; the exit status
wins over what was said. Stop is SIGTERM, then SIGKILL after worker.stop_seconds; a silent worker first gets SIGABRT,
so that its stacks stand in the log. A worker that was kept ready and does not begin is ended, and another one started
for the same attempt. Never blocks: the loop polls `fds` and calls `read` and `poll`.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import msgspec

from retraind import events, fsio
from retraind.config import WorkerConfig
from retraind.errors import HostError, Interrupted, RetraindError, WorkerLost, worker_error
from retraind.job import Order
from retraind.supervisor.ready import ReadyWorker, interpreter, spawn

log = logging.getLogger(__name__)

# From SIGABRT to SIGKILL: long enough to write every thread's stack.
_ABORT_GRACE_SECONDS = 3.0
_MAX_CONNECTIONS = 4
_READ_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the attempt ended: error is None when the candidate is complete. `exit_reason` is a metric label."""

    error: RetraindError | None
    exit_reason: str
    peak_bytes: int = 0
    sha256: str = ""  # of a dataset that was refused


class Child:
    """A running attempt. `start`, then `read` and `poll` until `poll` gives an outcome; `close` at the end."""

    def __init__(self, order: Order, config: WorkerConfig, ready: ReadyWorker | None = None) -> None:
        self.order = order
        self.last: events.Event | None = None
        self.num_unknown_events = 0
        self._order_path = Path(order.work_dir) / "order.json"
        self._python, self._config, self._ready = interpreter(config), config, ready
        self._begin_by: float | None = None  # of one that was kept ready, until its first event
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._listener: socket.socket | None = None
        self._connections: dict[socket.socket, bytearray] = {}
        self._terminal: events.Finished | events.Failed | None = None
        self._said_hello = False
        self._verdict: RetraindError | None = None  # why this side ended it
        self._exit_reason = ""
        self._kill_at: float | None = None
        self._heard_at = self._started_at = 0.0
        self._late: list[events.Event] = []

    @property
    def pid(self) -> int:
        """The process id, 0 before the start."""
        return self._process.pid if self._process else 0

    def start(self, now: float) -> None:
        """Writes the order down, listens, and spawns. Raises HostError worker_not_started, or OSError."""
        fsio.write_atomic(self._order_path, msgspec.json.encode(self.order), mode=0o640)
        self._listener = _listen(Path(self.order.socket))
        taken = None if self._ready is None else self._ready.take(self._python, self._order_path, now)
        if taken is None:
            self._spawn(now)
        else:
            process, self._begin_by = taken
            self._watch(process, now)

    def _spawn(self, now: float) -> None:
        try:
            process = spawn(self._python, str(self._order_path))
        except OSError as error:
            self.close()
            remedy = "check worker.python: `retraind check` tries it"
            raise HostError("worker_not_started", f"{self._python}: {error.strerror}", remedy=remedy) from error
        self._watch(process, now)

    def _watch(self, process: subprocess.Popen[bytes], now: float) -> None:
        self._process = process
        self._unwatch()
        self._pidfd = os.pidfd_open(process.pid)
        self._heard_at = self._started_at = now

    def _unwatch(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _start_over(self, now: float) -> None:
        """In place of one that was kept ready and is gone: of that one nothing more is heard. Raises as `start`."""
        assert self._ready is not None
        self._hang_up()
        self._begin_by = None
        self._ready.lost(now)
        self._listener = _listen(Path(self.order.socket))
        self._spawn(now)

    def fds(self) -> list[int]:
        """What to wait on: the process itself, the listener, the worker's connection."""
        sockets = [self._listener, *self._connections] if self._listener else []
        return [self._pidfd, *(s.fileno() for s in sockets if s is not None)]

    def read(self, now: float) -> list[events.Event]:
        """Every event that has arrived, in order. Never blocks."""
        self._accept()
        found: list[events.Event] = []
        for connection, buffer in list(self._connections.items()):
            is_open = _receive(connection, buffer)
            try:
                for line in _lines(buffer):
                    found += self._take(line)
            except events.ProtocolError as error:
                self._end(WorkerLost("protocol", str(error)), "protocol", now, signal.SIGKILL)
                is_open = False
            if not is_open:
                self._connections.pop(connection).clear()
                connection.close()
        if found:
            self._heard_at = now
            self.last = found[-1]
        return found

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._listener is not None:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                if len(self._connections) >= _MAX_CONNECTIONS:
                    connection.close()
                else:
                    self._connections[connection] = bytearray()

    def _take(self, line: bytes) -> list[events.Event]:
        envelope, event = events.decode(line)
        if (envelope.job, envelope.attempt) != (self.order.job, self.order.attempt):
            return []  # a straggler of an earlier attempt
        if event is None:
            self.num_unknown_events += 1
            return []
        if self._terminal is not None:
            raise events.ProtocolError(f"{envelope.kind} after the last event")
        self._said_hello = True
        if self._begin_by is not None:
            self._begin_by = None
            if self._ready is not None:
                self._ready.answered()
        if isinstance(event, events.Finished | events.Failed):
            self._terminal = event
        return [event]

    def stop(self, now: float) -> None:
        """Asks the worker to end at a safe point: its job goes back to the queue."""
        if self._verdict is None:
            error = Interrupted("terminated", "the worker was asked to stop")
            self._end(error, "interrupted", now, signal.SIGTERM, self._config.stop_seconds)

    def poll(self, now: float) -> Outcome | None:
        """Enforces the deadlines; the outcome once the process is gone and its last words are read."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            self._late += self.read(now)
            if self._begin_by is None or self._verdict is not None:
                return self._outcome(status)
            try:
                self._start_over(now)
            except (HostError, OSError) as error:
                return Outcome(HostError("worker_not_started", str(error)), "crashed")
            return None
        if self._begin_by is not None and now >= self._begin_by and self._verdict is None:
            log.warning("worker %d was kept ready and does not begin: another one is started", self.pid)
            self._hang_up()  # first, so that nothing that it still says is taken for the next one's
            self._process.kill()
            self._begin_by = float("inf")
        if self._kill_at is not None and now >= self._kill_at:
            self._process.kill()
        elif now - self._heard_at > self._config.silence_seconds:
            message = f"no event for {self._config.silence_seconds:g} s"
            self._end(WorkerLost("silent", message), "silent", now, signal.SIGABRT, _ABORT_GRACE_SECONDS)
        elif now - self._started_at > self._config.max_seconds:
            message = f"not done after worker.max_seconds, {self._config.max_seconds:g} s"
            self._end(WorkerLost("timeout", message), "timeout", now, signal.SIGABRT, _ABORT_GRACE_SECONDS)
        return None

    def late_events(self) -> list[events.Event]:
        """What arrived between the last `read` and the worker's end."""
        return self._late

    def next_deadline(self) -> float:
        """The monotonic time at which `poll` has something to enforce."""
        quiet = min(self._heard_at + self._config.silence_seconds, self._started_at + self._config.max_seconds)
        return min([quiet, *(at for at in (self._kill_at, self._begin_by) if at is not None)])

    def _end(self, error: RetraindError, reason: str, now: float, how: signal.Signals, grace: float = 0.0) -> None:
        if self._verdict is not None or self._process is None:
            return
        self._verdict, self._exit_reason, self._kill_at = error, reason, now + grace
        log.info("worker %d gets %s: %s", self.pid, how.name, error.message)
        self._process.send_signal(how)

    def _outcome(self, status: int) -> Outcome:
        finished = self._terminal if isinstance(self._terminal, events.Finished) else None
        peak_bytes = finished.peak_bytes if finished else 0
        if status == 0 and finished is not None:
            return Outcome(None, "finished", peak_bytes)
        if self._verdict is not None:
            return Outcome(self._verdict, self._exit_reason)
        if isinstance(self._terminal, events.Failed):
            return self._reported(self._terminal, status)
        if status < 0:
            return Outcome(
                WorkerLost("worker_crash", _describe_signal(-status)), "killed" if status == -9 else "crashed"
            )
        if status == Interrupted.exit_status:
            return Outcome(Interrupted("terminated", "the worker was asked to stop"), "interrupted")
        if not self._said_hello:
            message = f"{self._python} ended with status {status} before the worker began; its output is in the log"
            remedy = "check worker.python: `retraind check` tries it"
            return Outcome(HostError("worker_not_started", message, remedy=remedy), "crashed")
        if status == 0:
            return Outcome(WorkerLost("protocol", "the worker ended without a last event"), "protocol")
        message = f"the worker ended with status {status}; its traceback is in the log"
        return Outcome(WorkerLost("worker_crash", message), "crashed")

    @staticmethod
    def _reported(failed: events.Failed, status: int) -> Outcome:
        details = {"line": failed.line, "column": failed.column, "remedy": failed.remedy}
        try:
            error = worker_error(failed.code, failed.message, **details)
        except KeyError:
            return Outcome(WorkerLost("protocol", f"unknown error code {failed.code!r}: {failed.message}"), "protocol")
        if error.exit_status != status:
            message = f"reported {failed.code}, but ended with status {status}: {failed.message}"
            return Outcome(WorkerLost("worker_crash", message), "crashed")
        reason = "interrupted" if isinstance(error, Interrupted) else "failed"
        return Outcome(error, reason, sha256=failed.sha256)

    def close(self) -> None:
        """Ends the process if it still runs, and frees descriptors and the socket's name."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._unwatch()
        self._hang_up()
        try:
            Path(self.order.socket).unlink(missing_ok=True)
        except OSError as error:  # the next attempt takes the name away; this one must come to its end
            log.warning("%s stays behind: %s", self.order.socket, error.strerror)

    def _hang_up(self) -> None:
        """Hears nothing more of the process but its end."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _listen(path: Path) -> socket.socket:
    """A listening Unix socket, for this user only; bound through /proc, since sun_path ends at 108 bytes."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        path.chmod(0o600)
        listener.listen(_MAX_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(directory)
    return listener


def _receive(connection: socket.socket, buffer: bytearray) -> bool:
    """Moves what has arrived into the buffer; False at the end of the stream."""
    while len(buffer) <= events.MAX_LINE_BYTES:
        try:
            data = connection.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        if not data:
            return False
        buffer += data
    return True


def _lines(buffer: bytearray) -> list[bytes]:
    """Takes the complete lines out of the buffer. Raises ProtocolError for a line without end."""
    *lines, rest = bytes(buffer).split(b"\n")
    if len(rest) > events.MAX_LINE_BYTES:
        raise events.ProtocolError(f"a line of more than {events.MAX_LINE_BYTES} bytes")
    buffer[:] = rest
    return lines


def _describe_signal(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hints = {
        signal.SIGKILL: "the kernel does this when memory runs out: see `journalctl -k`",
        signal.SIGBUS: "often a full /dev/shm or a file cut short while it was mapped",
        signal.SIGILL: "this torch build uses instructions that the CPU does not have",
    }
    hint = hints.get(signal.Signals(number)) if number in set(signal.Signals) else None
    return f"the worker was ended by {name}" + (f" ({hint})" if hint else "")
