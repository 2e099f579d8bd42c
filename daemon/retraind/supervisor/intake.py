"""Which entries of incoming/ are complete and safe to take. The scan is the truth, events only wake it.

No event means "complete": mv, cp, rsync and hard links each look different. So an entry is complete when its size,
mtime and inode have not changed for the quiet window, by the monotonic clock, and nobody has it open for writing.
Changes nothing on disk. Raises OSError when incoming/ itself can not be listed.
"""

import enum
import errno
import fcntl
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

# rsync and dotfiles begin with a dot; the rest are what browsers, editors, scp clients and producers leave behind.
_TEMPORARY_SUFFIXES = (b"~", b".tmp", b".temp", b".part", b".partial", b".filepart", b".crdownload", b".swp", b".swx")
# A temporary name older than this belongs to a transfer that will not end.
STALE_TEMPORARY_SECONDS = 36 * 3600
# How long an entry that could be opened by nobody, or is still open for writing, rests before the next try.
_RECHECK_SECONDS = 1.0


@dataclass(slots=True)
class Entry:
    """One name in incoming/. `since` is when its signature was first seen, by the monotonic clock."""

    name: bytes
    size: int
    mtime_ns: int
    inode: int
    is_regular: bool
    since: float
    not_before: float = 0.0
    is_reported: bool = False

    @property
    def signature(self) -> tuple[int, int, int]:
        return self.size, self.mtime_ns, self.inode


@dataclass(slots=True)
class Scan:
    """What one look at incoming/ found. `ready` and `refused` are in the order in which they are to be taken."""

    ready: list[Entry] = field(default_factory=list)
    settling: list[Entry] = field(default_factory=list)
    refused: list[Entry] = field(default_factory=list)  # not regular files, quiet, whether or not they rest
    num_stale_temporaries: int = 0
    next_due: float | None = None  # monotonic time at which a settling entry may have become ready


class Obstacle(enum.Enum):
    """Why a quiet entry can not be taken now."""

    WRITER = "still open for writing"
    UNREADABLE = "not readable by the service"
    CHANGED = "changed since it was looked at"
    GONE = "gone"


def is_temporary(name: bytes) -> bool:
    """True for names that a transfer or an editor will rename or remove."""
    lower = name.lower()
    return lower.startswith(b".") or lower.endswith(_TEMPORARY_SUFFIXES) or (lower[:1] == b"#" == lower[-1:])


class Intake:
    """Remembers what each scan saw, so that the next one can tell what has been quiet."""

    def __init__(self, incoming: Path, quiet_seconds: float) -> None:
        self._incoming = os.fsencode(incoming)
        self.quiet_seconds = quiet_seconds
        self._seen: dict[bytes, Entry] = {}

    def scan(self, now: float, wall_time: float) -> Scan:
        """One look at the directory; `now` is monotonic. Costs one lstat an entry, 2 us each."""
        scan = Scan()
        seen: dict[bytes, Entry] = {}
        with os.scandir(self._incoming) as listing:
            for item in listing:
                try:
                    info = item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if is_temporary(item.name):
                    scan.num_stale_temporaries += wall_time - info.st_mtime > STALE_TEMPORARY_SECONDS
                    continue
                seen[item.name] = self._entry(item.name, info, now)
        self._seen = seen  # names that are gone are forgotten with the old table
        for entry in seen.values():
            self._sort(entry, scan, now)
        scan.ready.sort(key=lambda entry: (entry.mtime_ns, entry.name))
        scan.refused.sort(key=lambda entry: (entry.mtime_ns, entry.name))
        return scan

    def _entry(self, name: bytes, info: os.stat_result, now: float) -> Entry:
        is_regular = stat.S_ISREG(info.st_mode)
        fresh = Entry(name, info.st_size, info.st_mtime_ns, info.st_ino, is_regular, now)
        known = self._seen.get(name)
        return known if known is not None and known.signature == fresh.signature else fresh

    def _sort(self, entry: Entry, scan: Scan, now: float) -> None:
        due = entry.since + self.quiet_seconds
        if entry.is_regular:
            due = max(due, entry.not_before)
        if now < due:
            scan.settling.append(entry)
            scan.next_due = due if scan.next_due is None else min(scan.next_due, due)
        else:
            (scan.ready if entry.is_regular else scan.refused).append(entry)

    def obstacle(self, entry: Entry, now: float) -> Obstacle | None:
        """What keeps a quiet entry from being taken, asked of the kernel; None when it may be claimed.

        Opens first: the directory's owner can rename a foreign 0600 file, but not read it. On an obstacle the entry
        rests for a moment before it is looked at again.
        """
        found = self._probe(entry)
        if found is not None:
            entry.not_before = now + _RECHECK_SECONDS
        return found

    def _probe(self, entry: Entry) -> Obstacle | None:
        path = os.path.join(self._incoming, entry.name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return Obstacle.GONE
        except PermissionError:
            return Obstacle.UNREADABLE
        except OSError as error:
            # ELOOP: a symbolic link took the name; ENXIO: a socket. The next scan sees what it is.
            if error.errno in (errno.ELOOP, errno.ENXIO):
                return Obstacle.CHANGED
            raise
        try:
            info = os.fstat(fd)
            if (info.st_size, info.st_mtime_ns, info.st_ino) != entry.signature or not stat.S_ISREG(info.st_mode):
                return Obstacle.CHANGED
            return Obstacle.WRITER if has_writer(fd) else None
        finally:
            os.close(fd)


def has_writer(fd: int) -> bool:
    """True when some process has the file open for writing; False when not, or when the kernel will not say.

    A read lease is granted only while there is no writer, and is given back at once. Leases need the file's owner or
    CAP_LEASE and a filesystem that has them: otherwise the quiet window alone decides. SIGIO must be ignored by the
    process, since a writer that comes in between breaks the lease with it.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # broken in this instant: a writer has come
        return True
    return False
