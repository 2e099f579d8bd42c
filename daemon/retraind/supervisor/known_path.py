"""The path that consumers know, <dir>/<name>.pt, and what somebody else may have put in the place of what is ours.

A part of publish.py, which alone calls it, under its lock. A weights file that was at the path before is kept; anything
else that retraind did not make is refused and left as it is. Raises PublishError path_taken, and OSError unchanged.
"""

import logging
import os
from pathlib import Path

from retraind import fsio
from retraind.errors import PublishError

log = logging.getLogger(__name__)


def refuse_link(path: Path) -> None:
    """A link in the place of what is ours would lead our writes to where we do not know."""
    if path.is_symlink():
        raise taken(path, f"a link to {path.readlink()}")


def taken(path: Path, what: str) -> PublishError:
    """The error for a path that is not what retraind makes there."""
    return PublishError("path_taken", f"{path} is {what}, which retraind did not make", remedy="move it away")


def require_ours(link: Path, target: str) -> None:
    """Nothing, our link, or a plain file from before."""
    if link.is_symlink():
        found = str(link.readlink())
        if found != target:
            raise taken(link, f"a link to {found}")
    elif link.exists() and not link.is_file():
        raise taken(link, "not a file")


def put_in_place(link: Path, target: str, home: Path) -> None:
    """Makes the path lead to the live version, durably. To be called once `require_ours` has looked."""
    if link.is_symlink():
        fsio.fsync_dir(link.parent)
        return
    if link.exists():
        # A weights file from before: consumers keep finding a file here at every instant, and the old one is kept.
        kept = home / f"before-{fsio.sha256_of(link)[:12]}.pt"
        if not kept.exists():
            _keep(link, kept)
        fsio.fsync_dir(home)
        log.warning("%s was a file: kept as %s, now a link to the live version", link, kept)
    fsio.replace_link(link, target)


def _keep(path: Path, kept: Path) -> None:
    try:
        os.link(path, kept)
    except PermissionError:  # the kernel links no file of another owner for us (fs.protected_hardlinks): a copy
        fsio.write_new(kept, path.read_bytes(), mode=0o444)
