"""The jobs on disk: /var/lib/retraind/jobs/<id>/job.json, and the work directory of each.

Each change of a job is written (fsync, rename) before it is acted on, so a crash at any point leaves the last step
known. Remembers which content was published with which settings. Raises OSError when the disk fails.
"""

import logging
import os
import secrets
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from retraind import fsio, typed_json
from retraind.errors import HostError
from retraind.job import CHECKPOINT_NAME, FINAL_STATES, Job, JobState
from retraind.locks import take_lock
from retraind.report import Candidate

log = logging.getLogger(__name__)

# Records of ended jobs kept for `retraind jobs` and for recognising duplicates: 1 KB each, read once at start.
KEEP_RECORDS = 10_000


class Ledger:
    """Every job that is not ended, in memory and on disk, and the ended ones on disk."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.jobs_dir = state_dir / "jobs"
        self.open_jobs: dict[str, Job] = {}
        self.num_bad_records = 0
        self._published: dict[tuple[str, str], str] = {}
        self._num_records = 0

    def open(self) -> None:
        """Creates the directory, takes its lock. Raises HostError state_unusable, or already_running."""
        try:
            fsio.make_dir(self.jobs_dir, 0o750)
            take_lock(self.state_dir / ".lock", f"the state directory {self.state_dir}")
        except OSError as error:
            remedy = "check state.dir and its owner"
            raise HostError("state_unusable", f"{self.state_dir}: {error}", remedy=remedy) from error
        if not os.access(self.jobs_dir, os.R_OK | os.W_OK | os.X_OK):
            raise HostError("state_unusable", f"{self.jobs_dir} is not writable", remedy="check its owner and mode")

    def load(self) -> list[Job]:
        """Finds every job on disk again; returns the ended ones. A damaged record is put aside and counted."""
        ended: list[Job] = []
        self.open_jobs, self._published, self._num_records = {}, {}, 0
        for directory in sorted(self.jobs_dir.iterdir()):
            if not directory.is_dir():
                continue
            if directory.name.startswith("."):
                with suppress(OSError):
                    directory.rmdir()  # the service died while it made the directory of a job
                continue
            job = self._read(directory)
            if job is None:
                continue
            self._num_records += 1
            if job.state in FINAL_STATES:
                ended.append(job)
                self._index(job)
            else:
                self.open_jobs[job.id] = job
        return ended

    def _read(self, directory: Path) -> Job | None:
        path = directory / "job.json"
        try:
            job = typed_json.decode(path.read_bytes(), Job)
        except FileNotFoundError:
            return None
        except typed_json.Malformed as error:
            self.num_bad_records += 1
            log.error("%s is damaged (%s): put aside as job.json.bad, the dataset is taken anew", path, error)
            path.rename(directory / "job.json.bad")
            return None
        return job

    def new_id(self, now: datetime) -> str:
        """A job id that sorts by time and is unique here."""
        while True:
            job_id = f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
            if not (self.jobs_dir / job_id).exists():
                return job_id

    def save(self, job: Job) -> Job:
        """Writes the job down; when it returns, the step is durable and may be acted on."""
        directory = self.jobs_dir / job.id
        fsio.make_dir(directory, 0o750)
        fsio.write_atomic(directory / "job.json", msgspec.json.encode(job), mode=0o640)
        if job.state in FINAL_STATES:
            self.open_jobs.pop(job.id, None)
            self._index(job)
        else:
            self.open_jobs[job.id] = job
        return job

    def _index(self, job: Job) -> None:
        if job.state is JobState.PUBLISHED and job.sha256:
            self._published[job.sha256, job.settings] = job.id

    def published_before(self, sha256: str, settings: str) -> str | None:
        """The job that published this content with these settings, as far back as records are kept."""
        return self._published.get((sha256, settings))

    def work_dir(self, job_id: str) -> Path:
        """Where the worker keeps its cache and its checkpoint, and leaves its candidate."""
        return self.jobs_dir / job_id / "work"

    def fresh_work_dir(self, job_id: str) -> Path:
        """A work directory that holds nothing of an earlier attempt but its checkpoint."""
        path = self.work_dir(job_id)
        fsio.make_dir(path, 0o750)
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != CHECKPOINT_NAME:
                entry.unlink()  # an old candidate that stayed would be published as the new one
        return path

    def free_work_dir(self, job: Job) -> None:
        """Removes what an ended job no longer needs: weights, and the rows, which are as large as the dataset."""
        if job.state is not JobState.REJECTED:
            _remove(self.work_dir(job.id))
        else:  # somebody will want to look at the candidate
            (self.work_dir(job.id) / CHECKPOINT_NAME).unlink(missing_ok=True)

    def candidate(self, job_id: str) -> Candidate | None:
        """The finished candidate of a job, or None. The worker writes candidate.json last, so it is whole or absent."""
        try:
            data = (self.work_dir(job_id) / "candidate.json").read_bytes()
            return typed_json.decode(data, Candidate)
        except (OSError, typed_json.Malformed):
            return None

    def close(self) -> None:
        """Counts one more ended job, and removes the oldest records beyond the limit."""
        self._num_records += 1
        if self._num_records > KEEP_RECORDS * 1.1:
            self._prune()

    def _prune(self) -> None:
        names = sorted(path.name for path in self.jobs_dir.iterdir())
        for name in names[: len(names) - KEEP_RECORDS]:
            if name not in self.open_jobs:
                shutil.rmtree(self.jobs_dir / name, ignore_errors=True)
        self._num_records = min(len(names), KEEP_RECORDS)
        kept = set(names[-KEEP_RECORDS:])
        self._published = {key: job_id for key, job_id in self._published.items() if job_id in kept}


def _remove(directory: Path) -> None:
    """For good: what a power cut brings back, nobody removes again.

    Raises OSError: a candidate that an earlier attempt left, and that stays, would be taken for the next one's.
    """
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)
        fsio.fsync_dir(directory.parent)


def read_jobs(state_dir: Path) -> list[Job]:
    """Every readable job record, oldest first: for the command line, beside a running service."""
    jobs = []
    for path in sorted((state_dir / "jobs").glob("*/job.json")):
        try:
            jobs.append(typed_json.decode(path.read_bytes(), Job))
        except (OSError, typed_json.Malformed):
            continue
    return jobs
