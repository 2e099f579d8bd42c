"""What lies in a model's directory, read and never changed: versions, manifests, digests, the history.

Shared by the publisher and the command line; consumers have consumer.py. What is damaged is told apart from what is
missing, and nothing is believed about weights but their bytes. Raises OSError and Malformed where it says so.
"""

import os
import re
import stat
from pathlib import Path

from retraind import fsio, typed_json
from retraind.column_rules import HeldTo, rules_of
from retraind.config import DataConfig
from retraind.report import Manifest, SiblingFile
from retraind.supervisor.history import History, sequence_of

_VERSION = re.compile(r"[0-9]{6,}-[0-9a-f]{12}")
HISTORY_NAME = "history.json"


def version_dirs(home: Path) -> list[Path]:
    """The directories of a model's complete versions, oldest first; empty when there is none."""
    try:
        found = [Path(entry.path) for entry in os.scandir(home / "versions") if _VERSION.fullmatch(entry.name)]
    except OSError:
        return []
    return sorted(found, key=lambda path: sequence_of(path.name))


def strangers(home: Path) -> list[Path]:
    """What has a version's name and is no directory: nothing that retraind makes. Raises OSError."""
    with os.scandir(home / "versions") as entries:
        return [
            Path(entry.path)
            for entry in entries
            if _VERSION.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False)
        ]


def linked_version(current: Path) -> str:
    """The version that `current` leads to, empty when it is missing or no link of ours. One readlink."""
    try:
        head, _, version = str(current.readlink()).rstrip("/").partition("/")
    except OSError:
        return ""
    return version if head == "versions" and _VERSION.fullmatch(version) else ""


def read_manifest(version_dir: Path) -> Manifest | None:
    """The manifest in a version's directory, or None when it is missing or damaged."""
    try:
        return typed_json.decode((version_dir / "manifest.json").read_bytes(), Manifest)
    except (OSError, typed_json.Malformed):
        return None


def held_to(live: Manifest | None, data: DataConfig) -> HeldTo | None:
    """The metrics that the next dataset must have: the live version's, None where it decides by itself.

    They hold as long as nobody changed the rules by which they were chosen: that asks for a model of other metrics.
    """
    if live is None or data.metrics == "own" or live.dataset.rules != rules_of(data):
        return None
    return HeldTo(version=live.version, metric_names=live.metric_names, rate_metrics=live.dataset.rate_metrics)


def list_versions(home: Path) -> list[Manifest]:
    """The manifest of every complete version, oldest first."""
    found = (read_manifest(path) for path in version_dirs(home))
    return [manifest for manifest in found if manifest is not None]


def is_signed(version_dir: Path) -> bool:
    """True when a signature lies beside the manifest. Whether it is right is for who has the key."""
    return (version_dir / "manifest.json.sig").is_file()


def read_history(home: Path) -> History:
    """The history; an empty one when there is none. Raises OSError, and Malformed when it is damaged."""
    try:
        data = (home / HISTORY_NAME).read_bytes()
    except FileNotFoundError:
        return History()
    return typed_json.decode(data, History)


def files_of(manifest: Manifest) -> list[SiblingFile]:
    """Every file whose digest the manifest holds."""
    weights = SiblingFile(name="weights.pt", sha256=manifest.weights_sha256, num_bytes=manifest.weights_bytes)
    return [weights, *manifest.siblings]


def damage(version_dir: Path) -> str:
    """What is wrong with a version in words, empty when nothing is. Reads all of it: not for the service's loop."""
    manifest = read_manifest(version_dir)
    if manifest is None:
        return "manifest.json is missing or damaged"
    if manifest.version != version_dir.name:
        return f"manifest.json is of {manifest.version}"
    return next(filter(None, (_file_damage(version_dir, file) for file in files_of(manifest))), "")


def _file_damage(version_dir: Path, file: SiblingFile) -> str:
    path, name = version_dir / file.name, file.name
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            return f"{name} is not a file"
        if info.st_size != file.num_bytes:
            return f"{name} has {info.st_size} bytes, the manifest says {file.num_bytes}"
        found = fsio.sha256_of(path)
    except OSError as error:
        return f"{name}: {error.strerror}"
    return "" if found == file.sha256 else f"{name} has sha256 {found}, the manifest says {file.sha256}"
