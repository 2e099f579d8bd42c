"""For programs that use a model: the live weights and their manifest, both of ONE version. Standard library only.

This file stands alone: import it as retraind.consumer, or copy it into a program of your own. It only reads.
`current` is resolved once and the version's directory is held open, so a publication or a rollback in between changes
nothing; a version that is removed at that very moment is noticed and the next one is taken, a bounded number of times.
"""

import errno
import hashlib
import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

# Each try resolves `current` anew; to lose so often, a version must be removed within microseconds each time.
_NUM_TRIES = 10
_FIRST_PAUSE_SECONDS = 0.005


class ModelError(Exception):
    """No model can be read."""


class NotPublished(ModelError):
    """Nothing has been published under this name, or it can not be reached."""


class Damaged(ModelError):
    """The weights are not the bytes that were published, or the manifest can not be read."""


class Live(NamedTuple):
    """One version: `weights` are the bytes of weights.pt, for torch.load(io.BytesIO(weights), weights_only=True).

    `files` has the bytes of those further files of the version that were asked for, by name.
    """

    version: str
    weights: bytes
    manifest: dict[str, Any]
    files: dict[str, bytes]


def open_live(
    models_dir: str | os.PathLike[str], name: str = "telemetry_autoencoder", files: Collection[str] = ()
) -> Live:
    """The version that is live now, with those of `files` that it has: the manifest's `siblings` name all.

    Raises NotPublished, Damaged, and OSError such as PermissionError unchanged.
    """
    home = Path(models_dir) / name
    pause = _FIRST_PAUSE_SECONDS
    for _ in range(_NUM_TRIES - 1):
        try:
            return _read(home, files)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            time.sleep(pause)
            pause *= 2
    try:
        return _read(home, files)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        raise NotPublished(f"{home}: nothing is published there: {error.strerror}: {error.filename}") from error


def _read(home: Path, wanted: Collection[str]) -> Live:
    path = home / (home / "current").readlink()  # the one look at what is live
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        manifest, expected = _manifest(path, _bytes("manifest.json", directory), wanted)
        files = {name: _bytes(name, directory) for name in expected}
    finally:
        os.close(directory)
    for name, data in files.items():
        found = hashlib.sha256(data).hexdigest()
        if found != expected[name]:  # torch does not notice a flipped bit
            raise Damaged(f"{path} is damaged: {name} has sha256 {found}, {expected[name]} was published")
    return Live(path.name, files.pop("weights.pt"), manifest, files)


def _manifest(path: Path, text: bytes, wanted: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The manifest, and the sha256 of each file that is to be read."""
    try:
        manifest = json.loads(text)
        siblings = {one["name"]: one["sha256"] for one in manifest.get("siblings", []) if one["name"] in wanted}
        return manifest, {**siblings, "weights.pt": manifest["weights_sha256"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path}: manifest.json can not be read: {error}") from error


def _bytes(name: str, directory: int) -> bytes:
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory), "rb") as file:
        return file.read()
