"""The spool's directories as states: incoming/ -> active/<job>/ -> done/ or quarantine/. One file is in exactly one.

Every change is one rename on one filesystem, durable when the method returns; nothing is copied, opened for writing
or deleted: that is retention's alone, in done/. Names are bytes: a file's name is never decoded on its way. done/ and
quarantine/ have one writer, this process, which holds the lock. Raises HostError for a spool that can not be used,
OSError for a step that failed.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

from retraind import fsio, typed_json
from retraind.errors import HostError
from retraind.job import Reason
from retraind.locks import take_lock
from retraind.printable import printable

REASON_SUFFIX = b".reason.json"
# Producers may add files, but not list the directory or touch each other's: setgid, sticky, no read for the group.
_INCOMING_MODE = 0o3730
_PRIVATE_MODE = 0o2750
# Made while the service runs, where the unit's RestrictSUIDSGID= lets nobody set the setgid bit.
_CLAIM_MODE = 0o750
_NAME_MAX = 255


class ReasonFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of <name>.reason.json in quarantine/."""

    code: str
    message: str
    line: int | None
    column: int | None
    remedy: str
    sha256: str
    attempts: int
    job: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What lies in a directory of the spool; `oldest` is the smallest mtime, in seconds, None when empty."""

    num_files: int = 0
    num_bytes: int = 0
    oldest: float | None = None


class Spool:
    """The four directories below one root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.incoming = root / "incoming"
        self.active = root / "active"
        self.done = root / "done"
        self.quarantined = root / "quarantine"
        self._usage: dict[Path, tuple[int, Usage]] = {}

    def open(self) -> None:
        """Creates what is missing, takes the spool's lock and checks that a claim will work.

        Raises HostError spool_unusable when it will not, or when another service holds the spool.
        """
        try:
            for path in (self.incoming, self.active, self.done, self.quarantined):
                fsio.make_dir(path, _INCOMING_MODE if path == self.incoming else _PRIVATE_MODE)
            take_lock(self.root / ".lock", f"the spool {self.root}")
        except OSError as error:
            remedy = "check spool.dir and its owner"
            if isinstance(error, PermissionError):  # the unit's sandbox refuses the set-group-ID bit to the service
                remedy = "make its four directories as root, with the owners and modes of the table in OPERATIONS.md"
            raise HostError("spool_unusable", f"{self.root}: {error}", remedy=remedy) from error
        self.check()
        self._sweep_reasons()

    def _sweep_reasons(self) -> None:
        """Removes a reason whose file never came: the service was killed before it moved what is refused anew now.

        What is refused anew may get another name, with the id of another job: a reason half written is not overwritten.
        """
        for name in os.listdir(os.fsencode(self.quarantined)):
            path = os.path.join(os.fsencode(self.quarantined), name)
            if name.startswith(b".") and name.endswith(REASON_SUFFIX + b".tmp"):  # as fsio.write_atomic names it
                Path(os.fsdecode(path)).unlink(missing_ok=True)
                continue
            note = None if os.path.lexists(path.removesuffix(REASON_SUFFIX)) else read_reason(path)
            if note is not None and not (self.active / note.job).exists():
                Path(os.fsdecode(path)).unlink(missing_ok=True)

    def check(self) -> None:
        """Raises HostError spool_unusable when the directories can not be written or do not share a filesystem."""
        devices = set()
        for path in (self.incoming, self.active, self.done, self.quarantined):
            try:
                devices.add(path.stat().st_dev)
            except OSError as error:
                raise HostError("spool_unusable", f"{path}: {error.strerror}", remedy="create it again") from error
            if not os.access(path, os.R_OK | os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
                raise HostError("spool_unusable", f"{path} is not writable", remedy="check its owner, mode and mount")
        if len(devices) != 1:
            raise HostError(
                "spool_unusable",
                f"{self.root} spans {len(devices)} filesystems: a claim is a rename and needs one",
                remedy="mount the spool as a whole",
            )

    def claim(self, name: bytes, job_id: str) -> None:
        """incoming/<name> -> active/<job_id>/<name>. After a crash in between, the start sweeps the empty directory."""
        directory = self.active / job_id
        fsio.make_dir(directory, _CLAIM_MODE)
        fsio.move(os.path.join(os.fsencode(self.incoming), name), os.path.join(os.fsencode(directory), name))

    def claimed(self) -> list[str]:
        """The job ids that have a directory in active/, oldest first."""
        return sorted(path.name for path in self.active.iterdir() if path.is_dir())

    def dataset(self, job_id: str) -> bytes | None:
        """The path of a claimed file, or None when it is not there."""
        directory = os.fsencode(self.active / job_id)
        try:
            names = sorted(os.listdir(directory))
        except FileNotFoundError:
            return None
        return os.path.join(directory, names[0]) if names else None

    def release(self, job_id: str) -> None:
        """Removes the empty directory of a filed claim: the last step, so its presence means that work is left."""
        try:
            (self.active / job_id).rmdir()
        except FileNotFoundError:
            return
        fsio.fsync_dir(self.active)

    def archive(self, job_id: str) -> None:
        """active/<job_id>/<name> -> done/. Under another name if that one is taken. Repeating it is harmless."""
        source = self.dataset(job_id)
        if source is not None:
            fsio.move(source, self._free(self.done, os.path.basename(source), job_id))
        self.release(job_id)

    def quarantine(self, job_id: str, reason: Reason, *, sha256: str, attempts: int) -> None:
        """active/<job_id>/<name> -> quarantine/<name>, with <name>.reason.json. Repeating it is harmless."""
        source = self.dataset(job_id)
        if source is not None:
            self._quarantine(source, job_id, reason, sha256, attempts)
        self.release(job_id)

    def refuse(self, name: bytes, job_id: str, reason: Reason) -> None:
        """incoming/<name> -> quarantine/<name>, for what is not a file. A link is moved, not followed."""
        self._quarantine(os.path.join(os.fsencode(self.incoming), name), job_id, reason, "", 0)

    def give_back(self, job_id: str) -> None:
        """active/<job_id>/<name> -> incoming/: the file changed after it was read, so it is a new dataset."""
        source = self.dataset(job_id)
        if source is not None:
            fsio.move(source, self._free(self.incoming, os.path.basename(source), job_id))
        self.release(job_id)

    def in_quarantine(self) -> dict[str, bytes]:
        """The files in quarantine/ by the job of their reason file."""
        found = {}
        for name in sorted(os.listdir(os.fsencode(self.quarantined))):
            path = os.path.join(os.fsencode(self.quarantined), name)
            note = read_reason(path + REASON_SUFFIX)
            if note is not None:
                found[note.job] = path
        return found

    def requeue(self, path: bytes, job_id: str) -> str:
        """quarantine/<name> -> incoming/, and its reason file goes. Safe beside a running service; returns the name."""
        target = self._free(self.incoming, os.path.basename(path), job_id)
        fsio.move(path, target)
        Path(os.fsdecode(path + REASON_SUFFIX)).unlink(missing_ok=True)  # a service that starts sweeps it too
        return printable(os.path.basename(target))

    def _quarantine(self, source: bytes, job_id: str, reason: Reason, sha256: str, attempts: int) -> None:
        target = self._free(self.quarantined, os.path.basename(source), job_id)
        note = ReasonFile(
            code=reason.code,
            message=reason.message,
            line=reason.line,
            column=reason.column,
            remedy=reason.remedy,
            sha256=sha256,
            attempts=attempts,
            job=job_id,
        )
        # The reason goes first: power may fail between the two, and a file without its reason would be a riddle.
        path = Path(os.fsdecode(target + REASON_SUFFIX))
        fsio.write_atomic(path, msgspec.json.format(msgspec.json.encode(note)) + b"\n", mode=0o640)
        try:
            fsio.move(source, target)
        except OSError:
            if not os.path.lexists(target):  # a reason without its file would be a riddle too
                path.unlink(missing_ok=True)
            raise

    def _free(self, directory: Path, name: bytes, job_id: str) -> bytes:
        """A path in `directory` that no other file has: the name itself, or with the job's id before its extension."""
        stem, dot, extension = name.partition(b".")
        tagged = stem[: _NAME_MAX - 60] + b"." + job_id.encode() + dot + extension[-20:]
        short = len(name) + len(REASON_SUFFIX) + len(b"..tmp") <= _NAME_MAX
        for candidate in (name, tagged) if short else (tagged,):
            path = os.path.join(os.fsencode(directory), candidate)
            if not os.path.lexists(path) and self._owner(path + REASON_SUFFIX) in (None, job_id):
                return path
        raise FileExistsError(17, "no free name", os.fsdecode(os.path.join(os.fsencode(directory), name)))

    @staticmethod
    def _owner(path: bytes) -> str | None:
        """The job that a reason file belongs to; None when there is none, the empty string when it can not be read."""
        note = read_reason(path)
        return note.job if note is not None else ("" if os.path.lexists(path) else None)

    def usage(self, directory: Path) -> Usage:
        """What lies in done/ or quarantine/, counted anew only when the directory has changed."""
        changed_at = directory.stat().st_mtime_ns
        cached = self._usage.get(directory)
        if cached is None or cached[0] != changed_at:
            cached = (changed_at, count(directory))
            self._usage[directory] = cached
        return cached[1]


def read_reason(path: bytes) -> ReasonFile | None:
    """A reason file, or None when it is missing or damaged."""
    try:
        with open(path, "rb") as file:
            return typed_json.decode(file.read(2**20), ReasonFile)
    except (OSError, typed_json.Malformed):
        return None


def total(usages: list[Usage]) -> Usage:
    """What lies in several directories."""
    times = [usage.oldest for usage in usages if usage.oldest is not None]
    num_files, num_bytes = sum(usage.num_files for usage in usages), sum(usage.num_bytes for usage in usages)
    return Usage(num_files, num_bytes, min(times, default=None))


def count(directory: Path) -> Usage:
    """Files and bytes in a directory, reason files and names with a leading dot left out."""
    num_files, num_bytes, oldest = 0, 0, None
    with os.scandir(os.fsencode(directory)) as listing:
        for item in listing:
            if item.name.endswith(REASON_SUFFIX) or item.name.startswith(b"."):
                continue
            info = item.stat(follow_symlinks=False)
            num_files += 1
            num_bytes += info.st_size if stat.S_ISREG(info.st_mode) else 0
            oldest = info.st_mtime if oldest is None else min(oldest, info.st_mtime)
    return Usage(num_files, num_bytes, oldest)
