"""What wakes the loop: signals, inotify, the state of the watch. Handlers put a token in and return.

The only importer of watchdog. An event never means more than "look again", so a lost one costs at most the rescan
interval. Without inotify (descriptors or watches used up, a network filesystem) the scan goes on alone: mode "poll".
"""

import contextlib
import logging
import os
import signal
from pathlib import Path
from types import FrameType

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

log = logging.getLogger(__name__)

# Without inotify the scan is all there is: so often that a person dropping a file does not wonder.
POLL_SECONDS = 2.0
# How long to leave inotify alone after it failed.
REARM_SECONDS = 60.0
_SIGNALS = {signal.SIGTERM: "stop", signal.SIGINT: "stop", signal.SIGHUP: "reload"}


class Wake:
    """Tokens from anywhere, taken by the loop. Bounded: a token that is already waiting is not added again."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._tokens: dict[str, None] = {}
        self.num_events = 0

    def put(self, token: str) -> None:
        """Safe in a signal handler and in any thread: one dict store and one write that may not block."""
        self._tokens[token] = None
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"\0")

    def take(self) -> set[str]:
        """Every waiting token. Empties the pipe first, so that a token put meanwhile wakes again."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass
        found = set()
        while self._tokens:
            found.add(self._tokens.popitem()[0])
        return found

    def catch_signals(self) -> None:
        """SIGTERM and SIGINT stop, SIGHUP reloads. SIGIO, by which a broken lease is told, would kill: ignored."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGIO, signal.SIG_IGN)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.put(_SIGNALS[signal.Signals(number)])

    def close(self) -> None:
        """Frees the pipe."""
        os.close(self.fd)
        os.close(self._write_fd)


class _Handler(FileSystemEventHandler):
    def __init__(self, wake: Wake) -> None:
        self._wake = wake

    def on_any_event(self, event: FileSystemEvent) -> None:
        # Our own open for the lease check, and readers, are not news.
        if event.event_type not in ("opened", "closed_no_write"):
            self._wake.num_events += 1
            self._wake.put("scan")


class Watch:
    """The inotify watch on incoming/, armed before each first scan and armed anew when it dies."""

    def __init__(self, directory: Path, wake: Wake) -> None:
        self._directory = directory
        self._wake = wake
        self._observer: BaseObserver | None = None
        self._identity: tuple[int, int] | None = None
        self._rearm_at = 0.0

    @property
    def mode(self) -> str:
        """`inotify` or `poll`."""
        return "inotify" if self._observer is not None else "poll"

    def tend(self, now: float) -> None:
        """Arms the watch, or arms it again when it has died unseen: is_alive() stays True after `rm -rf incoming`."""
        if self._observer is not None and self._is_healthy(self._observer):
            return
        if self._observer is not None:
            log.warning("the watch on %s is gone (directory replaced?): arming it again", self._directory)
            self.close()
        elif now < self._rearm_at:
            return
        self._arm(now)

    def _arm(self, now: float) -> None:
        observer = None
        try:
            info = self._directory.stat()
            observer = Observer()
            observer.schedule(_Handler(self._wake), str(self._directory), recursive=False)
            observer.start()
        except OSError as error:
            log.warning("no inotify on %s (%s): polling every %g s", self._directory, error, POLL_SECONDS)
            self._rearm_at = now + REARM_SECONDS
            if observer is not None:
                with contextlib.suppress(OSError, RuntimeError):
                    observer.stop()
            return
        self._observer = observer
        self._identity = (info.st_dev, info.st_ino)
        self._wake.put("scan")  # what came before the watch was armed

    def _is_healthy(self, observer: BaseObserver) -> bool:
        try:
            info = self._directory.stat()
        except OSError:
            return False
        emitters = observer.emitters
        alive = observer.is_alive() and bool(emitters) and all(emitter.is_alive() for emitter in emitters)
        return alive and (info.st_dev, info.st_ino) == self._identity

    def close(self) -> None:
        """Stops the observer's threads."""
        if self._observer is not None:
            self._observer.stop()
            self._observer.join(timeout=5)
            self._observer = None
