"""A version's directory: every file of it written, synced and read back under a hidden name, then named by one rename.

    weights.pt, manifest.json, report.html   what every version has
    manifest.json.sig                        where publish.sign asks for it
    the manifest's `siblings`                what else the worker made for whoever uses the model

Owns the modes and the hidden names. Never makes a version live: no link leads to what is built here. If power fails,
a hidden left-over or a version without a link is left. Raises CandidateDamaged when a file is not the one that the
worker measured, PublishError when it can not be signed, OSError when the disk fails; nothing is left behind then.
"""

import errno
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from retraind import fsio
from retraind.report import Manifest, SiblingFile
from retraind.supervisor.page import PAGE_NAME, render
from retraind.supervisor.siblings import unfit
from retraind.supervisor.sign import signature_of
from retraind.supervisor.versions import files_of

DIR_MODE = 0o755  # consumers are other users: readable whatever the service's umask
FILE_MODE = 0o444
NEW = ".new-"  # half built: swept


class CandidateDamaged(Exception):
    """A file in the work directory is not the one that was measured."""


def build(
    target: Path, manifest: Manifest, before: Manifest | None, weights: bytes, work_dir: Path, sign: Sequence[str]
) -> Manifest:
    """Makes the version `target` of these weights and the manifest's siblings, which lie in `work_dir`.

    Its page is made here, of the facts and of those of the version `before`, and is one more sibling in the manifest
    that is written and returned: so its digest is verified, and signed, as that of any other file.
    """
    if fsio.sha256_of_bytes(weights) != manifest.weights_sha256:
        raise CandidateDamaged(f"weights of job {manifest.job} changed after they were measured")
    if problem := unfit(manifest.siblings):
        raise CandidateDamaged(f"job {manifest.job}: {problem}")
    manifest = msgspec.structs.replace(manifest, replaces=before.version if before else "")
    page = render(manifest, before).encode("utf-8", "backslashreplace")
    # A fresh name each time: a file whose fsync failed is never trusted again.
    hidden = target.with_name(f"{NEW}{target.name}-{secrets.token_hex(4)}")
    try:
        hidden.mkdir()
        fsio.write_new(hidden / "weights.pt", weights, mode=FILE_MODE)
        for sibling in manifest.siblings:
            fsio.write_new(hidden / sibling.name, _measured(work_dir, sibling, manifest.job), mode=FILE_MODE)
        fsio.write_new(hidden / PAGE_NAME, page, mode=FILE_MODE)
        listed = SiblingFile(name=PAGE_NAME, sha256=fsio.sha256_of_bytes(page), num_bytes=len(page))
        manifest = msgspec.structs.replace(manifest, siblings=[*manifest.siblings, listed])
        text = msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"
        fsio.write_new(hidden / "manifest.json", text, mode=FILE_MODE)
        if sign:
            signature = signature_of(hidden / "manifest.json", sign)
            fsio.write_new(hidden / "manifest.json.sig", signature, mode=FILE_MODE)
        hidden.chmod(DIR_MODE)
        fsio.fsync_dir(hidden)
        for file in files_of(manifest):
            if fsio.sha256_of(hidden / file.name) != file.sha256:
                raise OSError(errno.EIO, "read back other bytes than were written", str(hidden / file.name))
        hidden.rename(target)
        fsio.fsync_dir(target.parent)
    except BaseException:
        for path in (hidden, target):  # no link leads there yet
            shutil.rmtree(path, ignore_errors=True)
        raise
    return manifest


def _measured(work_dir: Path, sibling: SiblingFile, job: str) -> bytes:
    """A file's bytes, read no further than they should go. Raises CandidateDamaged unless they are those measured."""
    try:
        with (work_dir / sibling.name).open("rb") as file:
            data = file.read(sibling.num_bytes + 1)
    except FileNotFoundError as error:
        raise CandidateDamaged(f"{sibling.name} of job {job} is gone") from error
    if len(data) != sibling.num_bytes or fsio.sha256_of_bytes(data) != sibling.sha256:
        raise CandidateDamaged(f"{sibling.name} of job {job} changed after it was measured")
    return data
