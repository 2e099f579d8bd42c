"""What is kept in done/: the only place of the service in which the bytes of a dataset are deleted.

Off unless an operator sets spool.done_max_age_days or spool.done_max_bytes. Then the oldest go first, by the time at
which they came into done/: the ctime, which the rename into it sets, for mtime is the producer's. Only regular files
in done/ itself, nothing below it and nothing that a link leads to. Each turn lists or removes a bounded number, so a
directory of any size holds nothing up. Raises nothing: what can not be removed is said once and tried again.
"""

import heapq
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from retraind.config import SpoolConfig
from retraind.supervisor.metrics import Metrics

log = logging.getLogger(__name__)

# A few milliseconds of lstat.
_LISTED_A_LOOK = 2_000
# To unlink a file of many GB takes a filesystem long, so the time is bounded beside the number.
_REMOVED_A_LOOK = 100
_REMOVAL_SECONDS = 0.1
# Between two slices the loop does its other work.
_SLICE_SECONDS = 0.1
# The oldest that one sweep remembers: 200 KB of memory, however many files there are.
_REMEMBERED = 1_000
# Between two sweeps that find nothing to do. A change of done/ is looked at sooner, the later the more lies there.
_PAUSE_SECONDS = 60.0
_PAUSE_A_SLICE_SECONDS = 1.0
_DAY_NS = 86_400 * 10**9


@dataclass(frozen=True, slots=True, order=True)
class Archived:
    """One regular file in done/. `arrived_ns` is its ctime."""

    arrived_ns: int
    name: str
    size: int
    inode: int


def surplus(
    oldest: list[Archived], num_bytes: int, limits: SpoolConfig, now_ns: int, keep_ns: int | None = None
) -> list[Archived]:
    """Which of these files, oldest first, are to go; `num_bytes` is what lies in done/ in all.

    What came at `keep_ns` or later stays whatever the limits say; None is no such time.
    """
    chosen = []
    for file in oldest:
        age_days = (now_ns - file.arrived_ns) / _DAY_NS
        is_too_old = limits.done_max_age_days is not None and age_days > limits.done_max_age_days
        is_too_much = limits.done_max_bytes is not None and num_bytes > limits.done_max_bytes
        is_kept = keep_ns is not None and file.arrived_ns >= keep_ns
        if is_kept or not (is_too_old or is_too_much):
            break
        chosen.append(file)
        num_bytes -= file.size
    return chosen


class Retention:
    """One sweep after another: list done/ in slices, choose, remove in slices."""

    def __init__(self, done: Path, metrics: Metrics) -> None:
        self._done, self._metrics = done, metrics
        self.due_at = 0.0  # monotonic time of the next slice; infinite while nothing is to be removed ever
        self._limits = SpoolConfig()
        self._open = ExitStack()  # what a sweep has open
        self._fd = -1  # done/ as the sweep found it
        self._listing: Iterator[os.DirEntry[str]] | None = None
        self._newest_first: list[tuple[int, Archived]] = []  # a heap of at most _REMEMBERED, the newest on top
        self._num_bytes = self._num_files = 0
        self._plan: list[Archived] = []  # oldest last
        self._is_cut = False  # more than is remembered is to go
        self._swept_at, self._changed_ns = 0.0, 0
        self._said = ""

    def look(self, now: float, now_ns: int, limits: SpoolConfig, keep_ns: int | None) -> None:
        """One slice of what is due. New limits end what was begun under the old ones."""
        if limits != self._limits:
            self.close()
            self._limits, self.due_at = limits, 0.0
        if limits.done_max_age_days is None and limits.done_max_bytes is None:
            self.due_at = float("inf")
            return
        try:
            self._look(now, now_ns, keep_ns)
        except OSError as error:
            self.close()
            self.due_at = now + _PAUSE_SECONDS
            self._complain(f"{self._done}: {error.strerror}")

    def _look(self, now: float, now_ns: int, keep_ns: int | None) -> None:
        if self._fd < 0 and self._done.stat().st_mtime_ns != self._changed_ns:
            self.due_at = min(self.due_at, self._swept_at + self._pause())
        if now < self.due_at:
            return
        self.due_at = now + _SLICE_SECONDS
        if not self._plan:
            if not self._list_some():
                return
            oldest = sorted(file for _, file in self._newest_first)
            self._plan = surplus(oldest, self._num_bytes, self._limits, now_ns, keep_ns)[::-1]
            self._is_cut = len(self._plan) == len(oldest) < self._num_files
        self._remove_some()
        if not self._plan:
            self.close()
            self._swept_at = now
            self.due_at = now + (self._pause() if self._is_cut else self._calm_seconds(now_ns))

    def _calm_seconds(self, now_ns: int) -> float:
        """How long nothing needs to be done: until the oldest file that is still young is too old, a pause at most."""
        max_age_days = self._limits.done_max_age_days
        if max_age_days is None:
            return _PAUSE_SECONDS
        expiries = (file.arrived_ns + int(max_age_days * _DAY_NS) for _, file in self._newest_first)
        first_ns = min((expiry for expiry in expiries if expiry >= now_ns), default=None)
        if first_ns is None:
            return _PAUSE_SECONDS
        return min(max(self._pause(), (first_ns - now_ns) / 1e9), _PAUSE_SECONDS)

    def _pause(self) -> float:
        return _PAUSE_A_SLICE_SECONDS * (1 + self._num_files // _LISTED_A_LOOK)

    def _list_some(self) -> bool:
        """Goes on with the listing, or begins one; True when it is complete."""
        if self._listing is None:
            self._fd = os.open(self._done, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._open.callback(os.close, self._fd)
            self._changed_ns = os.fstat(self._fd).st_mtime_ns
            self._listing = self._open.enter_context(os.scandir(self._fd))
            self._newest_first, self._num_bytes, self._num_files = [], 0, 0
        for _ in range(_LISTED_A_LOOK):
            item = next(self._listing, None)
            if item is None:
                return True
            try:
                info = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            # No dataset has a name with a leading dot: intake does not take one.
            if stat.S_ISREG(info.st_mode) and not item.name.startswith("."):
                self._remember(Archived(info.st_ctime_ns, item.name, info.st_size, info.st_ino))
        return False

    def _remember(self, file: Archived) -> None:
        self._num_bytes += file.size
        self._num_files += 1
        add = heapq.heappush if len(self._newest_first) < _REMEMBERED else heapq.heappushpop
        add(self._newest_first, (-file.arrived_ns, file))

    def _remove_some(self) -> None:
        """A slice of the plan, one line in the log for it.

        Nothing is synced: a file that a power cut brings back is removed again.
        """
        num_files = num_bytes = 0
        until = time.monotonic() + _REMOVAL_SECONDS
        while self._plan and num_files < _REMOVED_A_LOOK and time.monotonic() < until:
            file = self._plan.pop()
            if self._remove(file):
                num_files += 1
                num_bytes += file.size
        if num_files:
            self._metrics.done_removed(num_files, num_bytes)
            log.info("removed %d files of %d bytes from %s, by its limits", num_files, num_bytes, self._done)

    def _remove(self, file: Archived) -> bool:
        """Unlinks what is still the file that was listed, in the directory that is still done/."""
        here, place = os.fstat(self._fd), self._done.lstat()
        if (here.st_dev, here.st_ino) != (place.st_dev, place.st_ino):
            self._plan.clear()  # an operator has put another directory in its place: the old one is theirs
            return False
        try:
            info = os.stat(file.name, dir_fd=self._fd, follow_symlinks=False)
            seen = Archived(info.st_ctime_ns, file.name, info.st_size, info.st_ino)
            if seen != file or not stat.S_ISREG(info.st_mode):
                return False
            os.unlink(file.name, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        except PermissionError as error:  # one that is made immutable must not keep the others
            self._complain(f"{self._done} keeps a file beyond its limits: {error.strerror}")
            return False
        return True

    def _complain(self, text: str) -> None:
        if text != self._said:
            log.warning("%s", text)
        self._said = text

    def close(self) -> None:
        """Ends a sweep; the next one begins anew."""
        self._open.close()
        self._fd, self._listing, self._plan = -1, None, []
