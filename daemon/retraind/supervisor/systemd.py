"""The conversation with systemd: READY, STATUS, WATCHDOG, RELOADING, STOPPING. The only importer of sdnotify.

Without NOTIFY_SOCKET every call does nothing. The watchdog is answered from the work loop, never from a thread, so
that a stuck loop is found. Source: sd_notify(3), systemd.service(5) on Type=notify-reload.
"""

import os
import time

from sdnotify import SystemdNotifier

# systemd's own advice is half of the time-out; a third leaves room for one scan of a very full spool.
_PINGS_PER_TIMEOUT = 3
# A busy PID 1 reads within milliseconds; beyond this a message is dropped, and the next one says more.
_SEND_SECONDS = 1.0


class Systemd:
    """Says what the service does; repeats nothing that has not changed."""

    def __init__(self) -> None:
        self._notifier = SystemdNotifier() if os.environ.get("NOTIFY_SOCKET") else None
        if self._notifier is not None and self._notifier.socket is not None:
            # sdnotify's socket blocks for as long as systemd does not read: the loop must not.
            self._notifier.socket.settimeout(_SEND_SECONDS)
        self._status = ""
        self._ping_at = 0.0
        self.ping_seconds = _watchdog_seconds()

    def _tell(self, text: str) -> None:
        if self._notifier is not None:
            self._notifier.notify(text)

    def close(self) -> None:
        """Frees the socket; nothing is told after that."""
        if self._notifier is not None and self._notifier.socket is not None:
            self._notifier.socket.close()
        self._notifier = None

    def ready(self) -> None:
        """Start, or the reload, is complete."""
        self._tell("READY=1")

    def status(self, text: str) -> None:
        """The line that `systemctl status` shows."""
        if text != self._status:
            self._status = text
            self._tell(f"STATUS={text}")

    def watchdog(self, now: float) -> None:
        """Answers the watchdog when a third of its time-out has gone by."""
        if self.ping_seconds is not None and now >= self._ping_at:
            self._ping_at = now + self.ping_seconds
            self._tell("WATCHDOG=1")

    def reloading(self) -> None:
        """A reload begins. systemd times it out unless the monotonic time comes with it."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def extend_start(self, seconds: float) -> None:
        """Asks for more time to start while a fault is waited out."""
        self._tell(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def stopping(self) -> None:
        """The stop has begun."""
        self._tell("STOPPING=1")


def _watchdog_seconds() -> float | None:
    """Seconds between two answers, or None when systemd does not ask this process for any."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdecimal() or int(microseconds) == 0:
        return None
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 1e6 / _PINGS_PER_TIMEOUT
