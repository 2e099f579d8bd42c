"""The worker's tie to its supervisor: events up, SIGTERM down, and death when the supervisor is gone.

Owns the socket, the sequence numbers and the flag that SIGTERM sets; the flag is looked at between two steps of work,
so a stop never tears one apart. Sends nothing from a thread: a heartbeat proves that the work moves. Raises
Interrupted after SIGTERM and when nobody reads any more.
"""

import ctypes
import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Self

from retraind import events
from retraind.errors import Interrupted

HEARTBEAT_SECONDS = 1.0
# Twice a second is as fast as a person reads and costs nothing beside training.
PROGRESS_SECONDS = 0.5
# The supervisor's loop answers within milliseconds; one that has not read for this long is not coming back.
SEND_TIMEOUT_SECONDS = 60.0
# sockaddr_un.sun_path of Linux, its closing zero included.
MAX_ADDRESS_BYTES = 107
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to SIGKILL this process when its parent dies; a fork does not inherit the wish."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def connect(path: Path) -> socket.socket:
    """Connects to a Unix socket whose path may be longer than an address can be. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(SEND_TIMEOUT_SECONDS)
    try:
        if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
            connection.connect(os.fspath(path))
            return connection
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
    except BaseException:
        connection.close()
        raise
    return connection


class Emitter:
    """Sends events of one attempt at one job."""

    def __init__(self, path: Path, *, job: str, attempt: int) -> None:
        self._job = job
        self._attempt = attempt
        self._seq = 0
        self._sent_at = 0.0
        self._progress_at = 0.0
        self._is_terminated = False
        self._is_gone = False
        self._socket = connect(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def terminate(self, _signum: int, _frame: FrameType | None) -> None:
        """The handler of SIGTERM: sets a flag and returns."""
        self._is_terminated = True

    def send(self, event: events.Event) -> None:
        """Sends one event. Raises Interrupted when the supervisor is gone; after that, sending does nothing."""
        if self._is_gone:
            return
        line = events.encode(event, job=self._job, attempt=self._attempt, seq=self._seq, t=time.time())
        try:
            self._socket.sendall(line)
        except OSError as error:  # EPIPE, ECONNRESET, or the time limit
            self._is_gone = True
            raise Interrupted("terminated", f"the supervisor does not listen any more: {error}") from error
        self._seq += 1
        self._sent_at = time.monotonic()

    def beat(self, done_share: float | None = None) -> None:
        """Called between two steps of work, as often as one likes: a heartbeat when one is due.

        Raises Interrupted after SIGTERM.
        """
        if self._is_terminated:
            raise Interrupted("terminated", "asked to stop")
        if time.monotonic() - self._sent_at >= HEARTBEAT_SECONDS:
            self.send(events.Heartbeat(done_share=done_share))

    def is_progress_due(self) -> bool:
        """Whether progress is worth a look at the device, which waits for its queue to run dry."""
        return time.monotonic() - self._progress_at >= PROGRESS_SECONDS

    def progress(self, progress: events.Progress) -> None:
        """Sends progress unless the last one is younger than PROGRESS_SECONDS. Raises Interrupted after SIGTERM."""
        if self.is_progress_due():
            self.send(progress)
            self._progress_at = time.monotonic()
        self.beat()
