"""The only writer of the models directory: immutable versions, one rename as the commit.

    <dir>/<name>.pt -> <name>/current/weights.pt      the path that consumers know
    <dir>/<name>/current -> versions/000042-3f2a...   ONE rename of this link publishes
    <dir>/<name>/versions/000042-3f2a.../             weights.pt, manifest.json: read-only, never changed

If power fails before that rename the old version is live and a hidden left-over is swept later; after it, the new
one. Raises PublishError for a machine's fault; what is published is what was measured, checked by its sha256.
"""

import errno
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec

from retraind import fsio, typed_json
from retraind.errors import PublishError
from retraind.report import Candidate, Manifest

log = logging.getLogger(__name__)

_DIR_MODE = 0o755  # consumers are other users: readable whatever the service's umask
_FILE_MODE = 0o444
_HIDDEN = ".new-"


class CandidateDamaged(Exception):
    """The weights in the work directory are not those that were measured."""


class Publisher:
    """One named model below the models directory."""

    def __init__(self, models_dir: Path, name: str) -> None:
        self.models_dir = models_dir
        self.name = name
        self.link = models_dir / f"{name}.pt"
        self.home = models_dir / name
        self.versions_dir = self.home / "versions"
        self.current = self.home / "current"

    def open(self) -> None:
        """Creates what is missing and sweeps what a crash left half built. Raises PublishError when it can not."""
        with self._faults():
            for path in (self.models_dir, self.home, self.versions_dir):
                fsio.make_dir(path, _DIR_MODE)
            with self._lock():
                for path in self.versions_dir.glob(f"{_HIDDEN}*"):
                    shutil.rmtree(path)
        self.check()

    def check(self) -> None:
        """Raises PublishError when a publication would fail for the machine's sake."""
        with self._faults():
            for path in (self.models_dir, self.home, self.versions_dir):
                if not path.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
                if not os.access(path, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, "not writable", str(path))
                if os.statvfs(path).f_flag & os.ST_RDONLY:
                    raise OSError(errno.EROFS, "read-only filesystem", str(path))
        self._refuse_foreign_link()

    def publish(self, candidate: Candidate, weights: Path, job_id: str, now: datetime) -> Manifest:
        """Makes the candidate the live version; when it returns, the commit is done. Repeating it is harmless.

        Raises CandidateDamaged when the weights are not those that were measured, PublishError when the machine
        fails; the version that was live stays live, whole.
        """
        with self._faults():
            data = weights.read_bytes()
        with self._faults(), self._lock():
            self.check()
            manifest = self._find(job_id)
            if manifest is None:
                manifest = self._build(candidate, data, job_id, now)
            self._commit(manifest.version)
        return manifest

    def _find(self, job_id: str) -> Manifest | None:
        """The version that this job already built: a crash came between the build and the record of it."""
        for path in version_dirs(self.home)[-3:]:  # a job's version is the newest or nearly so
            manifest = read_manifest(path)
            if manifest is not None and manifest.job == job_id:
                return manifest
        return None

    def _build(self, candidate: Candidate, data: bytes, job_id: str, now: datetime) -> Manifest:
        if fsio.sha256_of_bytes(data) != candidate.weights_sha256:
            raise CandidateDamaged(f"weights of job {job_id} changed after they were measured")
        sequence = 1 + max((_sequence(path) for path in version_dirs(self.home)), default=0)
        version = f"{sequence:06d}-{candidate.weights_sha256[:12]}"
        manifest = _manifest(candidate, version, sequence, self.name, job_id, now)
        # A fresh name each time: a file whose fsync failed is never trusted again.
        hidden = self.versions_dir / f"{_HIDDEN}{version}-{secrets.token_hex(4)}"
        try:
            hidden.mkdir()
            text = msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"
            fsio.write_new(hidden / "weights.pt", data, mode=_FILE_MODE)
            fsio.write_new(hidden / "manifest.json", text, mode=_FILE_MODE)
            hidden.chmod(_DIR_MODE)
            fsio.fsync_dir(hidden)
            if fsio.sha256_of(hidden / "weights.pt") != candidate.weights_sha256:
                raise OSError(errno.EIO, "read back other bytes than were written", str(hidden))
            hidden.rename(self.versions_dir / version)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        return manifest

    def _commit(self, version: str) -> None:
        """Each directory is synced even where nothing is left to do: an earlier try may have failed at just that."""
        fsio.fsync_dir(self.versions_dir)
        if self.live_version() != version:
            fsio.replace_link(self.current, f"versions/{version}")
        else:
            fsio.fsync_dir(self.home)
        self._link_known_path()

    def _link_known_path(self) -> None:
        target = f"{self.name}/current/weights.pt"
        if self.link.is_symlink():  # checked to be ours
            fsio.fsync_dir(self.models_dir)
            return
        if self.link.exists():
            # A weights file from before: consumers keep finding a file here at every instant, and the old one is kept.
            kept = self.home / f"before-{fsio.sha256_of(self.link)[:12]}.pt"
            if not kept.exists():
                os.link(self.link, kept)
            log.warning("%s was a file: kept as %s, now a link to the live version", self.link, kept)
        fsio.replace_link(self.link, target)

    def _refuse_foreign_link(self) -> None:
        if os.path.lexists(self.current) and not self.current.is_symlink():
            raise PublishError("path_taken", f"{self.current} is not a link", remedy="move it away")
        if self.link.is_symlink():
            target = os.readlink(self.link)
            if target == f"{self.name}/current/weights.pt":
                return
            what = f"a link to {target}"
        elif self.link.exists() and not self.link.is_file():
            what = "not a file"
        else:
            return
        raise PublishError("path_taken", f"{self.link} is {what}, which retraind did not make", remedy="move it away")

    def live(self) -> Manifest | None:
        """The manifest of the live version, or None when nothing is published or it can not be read."""
        return read_manifest(self.current)

    def live_version(self) -> str:
        """The name of the live version, empty when nothing is published. One readlink."""
        try:
            return os.path.basename(os.readlink(self.current))
        except OSError:
            return ""

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One publisher at a time, also against `retraind train` beside the service."""
        fd = os.open(self.home / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PublishError("locked", f"another process publishes {self.name} at this moment") from None
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


def _manifest(candidate: Candidate, version: str, sequence: int, name: str, job_id: str, now: datetime) -> Manifest:
    return Manifest(
        version=version,
        sequence=sequence,
        model_name=name,
        published_at=now,
        job=job_id,
        weights_sha256=candidate.weights_sha256,
        weights_bytes=candidate.weights_bytes,
        shape=candidate.shape,
        metric_names=candidate.dataset.metric_names,
        scaler=candidate.scaler,
        threshold=None,
        dataset=candidate.dataset,
        training=candidate.training,
        evaluation=candidate.evaluation,
        versions=candidate.versions,
    )


def _sequence(version_dir: Path) -> int:
    head = version_dir.name.partition("-")[0]
    return int(head) if head.isdecimal() else 0


def version_dirs(home: Path) -> list[Path]:
    """The directories of a model's complete versions, oldest first; empty when there is none."""
    try:
        return sorted((path for path in (home / "versions").iterdir() if path.name[0] != "."), key=_sequence)
    except OSError:
        return []


def read_manifest(version_dir: Path) -> Manifest | None:
    """The manifest in a version's directory, or None when it is missing or damaged."""
    try:
        return typed_json.decode((version_dir / "manifest.json").read_bytes(), Manifest)
    except (OSError, typed_json.Malformed):
        return None


def list_versions(home: Path) -> list[Manifest]:
    """The manifest of every complete version, oldest first."""
    found = (read_manifest(path) for path in version_dirs(home))
    return [manifest for manifest in found if manifest is not None]
