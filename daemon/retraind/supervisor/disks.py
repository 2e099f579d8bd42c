"""How much room is left where the service writes, and whether that is enough for a job to be started.

Owns the figures of the three filesystems: asked here, shown as metrics, judged against limits.min_free_bytes. The
floor is the operator's reserve for everything else on the machine; what one job needs at least is the worker's check
host.disk. Writes nothing and raises nothing: a filesystem that can not be asked is a fault that others show.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from retraind.supervisor.faults import Faults
from retraind.supervisor.metrics import Metrics, Space

# Three system calls: often enough for what a running job writes, too seldom to be seen in the service's load.
_LOOK_SECONDS = 2.0
# What an attempt at a small file takes. The worker's check host.disk asks for as much before each job.
_JOB_BYTES = 64 * 2**20
# A filesystem that was low must have a tenth more than the floor, or a job that frees little would start and stop it.
_SHARE_MORE = 10


def ask(directory: Path) -> Space | None:
    """The space of the directory's filesystem; None when it can not be asked."""
    try:
        facts = os.statvfs(directory)
    except OSError:
        return None
    return Space(facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize)


def has_room(directory: Path, floor_bytes: int) -> bool:
    """Whether a job could be started there now, by what is free."""
    space = ask(directory)
    return space is not None and space.free >= max(_JOB_BYTES, floor_bytes)


def is_low(free_bytes: int, floor_bytes: int, *, was_low: bool) -> bool:
    """Whether a filesystem has too little; one that had must show more than the floor. A floor of 0 is none."""
    return free_bytes < floor_bytes + (floor_bytes // _SHARE_MORE if was_low else 0)


class Disks:
    """The filesystems below spool.dir, models.dir and state.dir, and the fault of too little room."""

    def __init__(self, directories: Mapping[str, Path], faults: Faults, metrics: Metrics) -> None:
        self._directories, self._faults, self._metrics = directories, faults, metrics
        self._low: frozenset[str] = frozenset()
        self.look_at = 0.0  # monotonic time of the next look

    def look(self, now: float, floor_bytes: int) -> None:
        """Asks when it is time, shows what was found, and shows or heals the fault `low_disk`."""
        if now < self.look_at:
            return
        self.look_at = now + _LOOK_SECONDS
        found = {name: space for name, path in self._directories.items() if (space := ask(path)) is not None}
        self._metrics.disks_seen(found)
        self._low = frozenset(
            name for name, space in found.items() if is_low(space.free, floor_bytes, was_low=name in self._low)
        )
        if not self._low:
            self._faults.heal("low_disk")
            return
        # Without the figure, which moves all the time: the text is logged whenever it changes. The metric has it.
        places = ", ".join(str(path) for name, path in self._directories.items() if name in self._low)
        floor = f"{floor_bytes / 2**20:.4g} MiB, limits.min_free_bytes"
        self._faults.show("low_disk", f"less than {floor}, is free below {places}: nothing is started")
