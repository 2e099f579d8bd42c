"""Log lines for the journal or for a terminal: each with its priority and its job, a record's further lines set in.

Under systemd the line begins with `<N>`, the syslog priority, and has no time, since the journal has its own.
Elsewhere it begins with the time and the level. Owns the root logger's one handler, nothing else.
"""

import logging
import os
import sys
from typing import TextIO

from retraind.printable import printable

# Syslog's numbers, as sd-daemon(3) reads them at the head of a line.
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))


class _Formatter(logging.Formatter):
    def __init__(self, job: str, *, for_journal: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._job = f"job {job}: " if job else ""
        self._for_journal = for_journal

    def format(self, record: logging.LogRecord) -> str:
        first, *more = record.getMessage().splitlines() or [""]
        # Set in, so that what a dataset says after a line break can not pass for a record.
        lines = [first, *(f"  {line}" for line in more)]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        head = self._head(record) + self._job
        return "\n".join(head + printable(line.expandtabs()) for line in lines)

    def _head(self, record: logging.LogRecord) -> str:
        if self._for_journal:
            return f"<{next(number for level, number in _PRIORITIES if record.levelno >= level)}>"
        return f"{self.formatTime(record, self.datefmt)} {record.levelname.lower():<7} "


def setup(level: str, *, job: str = "", stream: TextIO | None = None) -> None:
    """Sends the root logger's records to the stream, standard error by default."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter(job, for_journal=is_journal(stream)))
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """`debug`, `info`, `warning` or `error`; also at a reload."""
    logging.getLogger().setLevel(level.upper())


def is_journal(stream: TextIO) -> bool:
    """True when the stream is the journal's own socket: systemd names it in JOURNAL_STREAM as device:inode."""
    try:
        info = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{info.st_dev}:{info.st_ino}"
