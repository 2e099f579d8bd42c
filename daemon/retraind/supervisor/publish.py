"""The only writer of the models directory: immutable versions, one rename as the commit.

    <dir>/<name>.pt -> <name>/current/weights.pt      the path that consumers know
    <dir>/<name>/current -> versions/000042-3f2a...   ONE rename of this link publishes, or rolls back
    <dir>/<name>/versions/000042-3f2a.../             what `build` makes: read-only, never changed
    <dir>/<name>/history.json                         what was live when, and what is pinned

If power fails before that rename the old version is live and a hidden left-over is swept later; after it, the new
one. Raises PublishError for a machine's fault; what is published is what was measured, checked by its sha256.
"""

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec

from retraind import fsio, typed_json
from retraind.errors import PublishError, UsageError
from retraind.report import Candidate, Criterion, Manifest, manifest_of
from retraind.supervisor import history as past
from retraind.supervisor.build import DIR_MODE, NEW, build
from retraind.supervisor.history import History
from retraind.supervisor.known_path import put_in_place, refuse_link, require_ours, taken
from retraind.supervisor.versions import (
    HISTORY_NAME,
    damage,
    is_signed,
    linked_version,
    read_history,
    read_manifest,
    strangers,
    version_dirs,
)

log = logging.getLogger(__name__)

_OLD = ".old-"  # half removed: swept, as what is half built is
# What is beyond it waits for the next publication: an upgrade meets thousands of versions.
_REMOVED_AT_ONCE = 100
_LOCK_POLL_SECONDS = 0.05
# How long a command waits for the service: longer than a publication takes with its signature.
WAIT_SECONDS = 15.0


class Publisher:
    """One named model below the models directory."""

    def __init__(self, models_dir: Path, name: str, wait_seconds: float = 0.0) -> None:
        """`wait_seconds` is how long another process that publishes is waited for: not at all by the loop."""
        self.models_dir = models_dir
        self.name = name
        self.link = models_dir / f"{name}.pt"
        self.home = models_dir / name
        self.versions_dir = self.home / "versions"
        self.current = self.home / "current"
        self._target = f"{name}/current/weights.pt"
        self._wait_seconds = wait_seconds

    def open(self) -> None:
        """Creates what is missing and sweeps what a crash left half built. Raises PublishError when it can not."""
        with self._faults():
            fsio.make_dir(self.models_dir, DIR_MODE)
            with fsio.as_owner_of(self.models_dir):
                for path in (self.home, self.versions_dir):
                    refuse_link(path)
                    fsio.make_dir(path, DIR_MODE)
            with self._lock():
                self._sweep()
        self.check()

    def check(self) -> None:
        """Raises PublishError when a publication would fail for the machine's sake."""
        with self._faults():
            for path in (self.models_dir, self.home, self.versions_dir):
                if path != self.models_dir:
                    refuse_link(path)
                if not path.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
                if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
                    raise PermissionError(errno.EACCES, "not writable", str(path))
                if os.statvfs(path).f_flag & os.ST_RDONLY:
                    raise OSError(errno.EROFS, "read-only filesystem", str(path))
            for path in (self.home / ".lock", *strangers(self.home)):
                refuse_link(path)
        if os.path.lexists(self.current) and not self.live_version():
            is_link = self.current.is_symlink()
            raise taken(self.current, f"a link to {os.readlink(self.current)}" if is_link else "not a link")
        require_ours(self.link, self._target)

    def publish(
        self,
        candidate: Candidate,
        weights: Path,
        job_id: str,
        now: datetime,
        sign: Sequence[str] = (),
        gate: Sequence[Criterion] = (),
        *,
        live: bool = True,
    ) -> Manifest:
        """Makes the candidate the live version; when it returns, the commit is done. Repeating it is harmless.

        Its weights lie at `weights`, its other files beside them. Without `live` the version is made and waits for
        `promote`.

        A version that was live before, or that is older than one that was, is left as it is: a job that is published
        again after a crash must not undo a rollback. `sign` is a program that signs the manifest, `gate` what the gate
        looked at. Raises CandidateDamaged when a file is not the one that was measured, PublishError when the machine
        or the signing fails; the version that was live stays live, whole.
        """
        with self._faults():
            data = weights.read_bytes()
        with self._faults(), self._lock():
            self.check()
            self._sweep()
            history = self._history(now)
            manifest = self._find(job_id, sign)
            if manifest is None:
                version, sequence = self._next(candidate, history)
                facts = manifest_of(candidate, version, sequence, self.name, job_id, now, gate)
                manifest = build(self.versions_dir / version, facts, self.live(), data, weights.parent, sign)
            else:
                fsio.fsync_dir(self.versions_dir)
            if not live:
                if past.counted(history, manifest.version) != history:
                    self._write_history(past.counted(history, manifest.version))
                return manifest
            if self.live_version() != manifest.version and manifest.sequence <= past.newest(history):
                log.warning("%s of job %s is not made live again: %s is", *(manifest.version, job_id, self.current))
                return manifest
            self._switch(past.switched(history, manifest.version, "publication", now), history)
        return manifest

    def rollback(self, version: str, now: datetime, sign: Sequence[str] = ()) -> tuple[str, str]:
        """As `promote`, for "" the version that was live before."""
        return self._make_live(version, "rollback", now, sign)

    def promote(self, version: str, now: datetime, sign: Sequence[str] = ()) -> tuple[str, str]:
        """Makes a version live that waits, or any other; returns what was live and what is.

        One rename, as a publication. Raises UsageError for a version that is not there, or is damaged.
        """
        return self._make_live(version, "promotion", now, sign)

    def _make_live(self, version: str, by: past.By, now: datetime, sign: Sequence[str]) -> tuple[str, str]:
        with self._faults(), self._lock():
            self.check()
            history = self._history(now)
            live, target = self.live_version(), version or past.previous(history)
            if not target:
                raise UsageError("not_found", "no version was live before this one", remedy="name a version")
            if target == live:
                raise UsageError("bad_argument", f"{target} is live already")
            directory = self._existing(target)
            if problem := damage(directory):
                raise UsageError("bad_argument", f"{target} is damaged: {problem}", remedy="choose another version")
            if sign and not is_signed(directory):
                raise PublishError("sign_failed", f"{target} has no signature, and publish.sign asks for one")
            self._switch(past.switched(history, target, by, now), history)
        return live, target

    def pin(self, version: str, now: datetime, *, on: bool) -> bool:
        """Keeps a version from being removed, or no longer; False when it was so already. Raises UsageError."""
        with self._faults(), self._lock():
            self.check()
            history = self._history(now)
            if (version in history.pinned) == on:
                return False
            if on:
                self._existing(version)
            pinned = [*history.pinned, version] if on else [one for one in history.pinned if one != version]
            self._write_history(msgspec.structs.replace(history, pinned=pinned))
        return True

    def prune(self, keep: int | None, now: datetime) -> list[str]:
        """Removes the versions beyond the newest `keep`; see history.superfluous for what is never removed.

        If power fails here, hidden names are left, which the next publication sweeps.
        """
        with self._faults(), self._lock():
            self.check()
            versions = [path.name for path in version_dirs(self.home)]
            removed = past.superfluous(versions, self._history(now), keep)[:_REMOVED_AT_ONCE]
            for version in removed:
                (self.versions_dir / version).rename(self.versions_dir / f"{_OLD}{version}")
            if removed:
                fsio.fsync_dir(self.versions_dir)  # a power cut must not bring a name back that has lost its files
                self._sweep()
        return removed

    def _existing(self, version: str) -> Path:
        directory = self.versions_dir / version
        if not version or not directory.is_dir():
            raise UsageError("not_found", f"there is no version {version}", remedy="`retraind models` lists them")
        return directory

    def _sweep(self) -> None:
        """What a crash left half built or half removed: nobody but the holder of the lock makes such names."""
        for prefix in (NEW, _OLD):
            for path in self.versions_dir.glob(f"{prefix}*"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def _history(self, now: datetime) -> History:
        """As the link proves it. A damaged one is put aside, and then all that is there counts as pinned."""
        path = self.home / HISTORY_NAME
        refuse_link(path)
        try:
            history = read_history(self.home)
        except typed_json.Malformed as error:
            log.error("%s is damaged (%s): put aside as %s.bad, every version is pinned", path, error, HISTORY_NAME)
            path.replace(path.with_name(f"{HISTORY_NAME}.bad"))
            history = History(pinned=[one.name for one in version_dirs(self.home)])
            self._write_history(history)
        return past.settled(history, self.live_version(), now)

    def _write_history(self, history: History) -> None:
        text = msgspec.json.format(msgspec.json.encode(history)) + b"\n"
        fsio.write_atomic(self.home / HISTORY_NAME, text, mode=0o644)

    def _find(self, job_id: str, sign: Sequence[str]) -> Manifest | None:
        """The version that this job already built: a crash came between the build and the record of it."""
        for path in version_dirs(self.home)[-3:]:  # a job's version is the newest or nearly so
            manifest = read_manifest(path)
            if manifest is not None and manifest.job == job_id and (is_signed(path) or not sign):
                return manifest
        return None

    def _next(self, candidate: Candidate, history: History) -> tuple[str, int]:
        """Name and number of the version that comes next: a number is never given twice."""
        found = (past.sequence_of(path.name) for path in version_dirs(self.home))
        sequence = 1 + max([history.last_sequence, *found])
        return f"{sequence:06d}-{candidate.weights_sha256[:12]}", sequence

    def _switch(self, history: History, before: History) -> None:
        """The commit: the history's last version becomes live. What an earlier try may have left undone is done anew.

        A directory whose fsync failed is not synced once more and believed: the link is made and renamed again.
        """
        version = history.switches[-1].version
        if history != before:
            self._write_history(history)
        try:
            fsio.replace_link(self.current, f"versions/{version}")
            put_in_place(self.link, self._target, self.home)
        except OSError as error:
            if self.live_version() == version:
                log.error("%s is live, but %s: it is not sure yet to survive a power cut", version, error.strerror)
            raise

    def live(self) -> Manifest | None:
        """The manifest of the live version, or None when nothing is published or it can not be read."""
        return read_manifest(self.current)

    def live_version(self) -> str:
        """The name of the live version, empty when nothing is published. One readlink."""
        return linked_version(self.current)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One publisher at a time, also against the commands beside the service.

        What root's command makes meanwhile belongs to the owner of the directory: the service must not be shut out.
        """
        until = time.monotonic() + self._wait_seconds
        with fsio.as_owner_of(self.models_dir):
            path = self.home / ".lock"
            refuse_link(path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                while not _locked(fd):
                    if time.monotonic() >= until:
                        raise PublishError("locked", f"another process publishes {self.name} at this moment")
                    time.sleep(_LOCK_POLL_SECONDS)
                yield
            finally:
                os.close(fd)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            code = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "models_dir_unwritable"
            message = f"{error.filename or self.models_dir}: {error.strerror}"
            raise PublishError(code, message, remedy="check models.dir: owner, mode, mount and free space") from error


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
