"""Which version was live when, and which are pinned: `history.json` beside a model's versions. Pure; publish does I/O.

A switch of the live version is written down before the link is renamed, since a stale publication must not undo a
rollback after a crash. So the last entry may be of a switch that was never made: the link alone says what is live, and
`settled` brings the two together. Changes nothing itself, raises nothing.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

import msgspec

# Enough to see what was live in the last months; a pin or a sequence number is never forgotten.
_KEEP_SWITCHES = 100


By = Literal["publication", "rollback", "promotion"]


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """A version became live. `hand`: somebody changed the link without retraind."""

    version: str
    at: datetime
    by: Literal["publication", "rollback", "promotion", "hand"]


class History(msgspec.Struct, frozen=True, kw_only=True):
    """`last_sequence` is the highest number that was to be live: it counts on when the newest version is removed."""

    switches: list[Switch] = []
    pinned: list[str] = []
    last_sequence: int = 0
    schema: int = 1


def sequence_of(version: str) -> int:
    """The number of a version, 0 of what is none."""
    head = version.partition("-")[0]
    return int(head) if head.isdecimal() else 0


def settled(history: History, live: str, now: datetime) -> History:
    """The history as the link proves it: without a last switch that was never made, with one that was made by hand."""
    switches = list(history.switches)
    if switches and switches[-1].version != live and (len(switches) == 1 or switches[-2].version == live):
        del switches[-1]
    if live and (not switches or switches[-1].version != live):
        switches.append(Switch(version=live, at=now, by="hand"))
    return msgspec.structs.replace(history, switches=switches)


def waiting(history: History, versions: Iterable[str]) -> list[str]:
    """The versions that are newer than any that was live: made, and not promoted."""
    return [version for version in versions if sequence_of(version) > newest(history)]


def counted(history: History, version: str) -> History:
    """With the version's number as given, also if it never becomes live."""
    return msgspec.structs.replace(history, last_sequence=max(history.last_sequence, sequence_of(version)))


def switched(history: History, version: str, by: By, now: datetime) -> History:
    """With one more switch; itself when the version is the last one already."""
    if history.switches and history.switches[-1].version == version:
        return history
    switches = [*history.switches, Switch(version=version, at=now, by=by)][-_KEEP_SWITCHES:]
    return msgspec.structs.replace(counted(history, version), switches=switches)


def newest(history: History) -> int:
    """The highest number that was live: what is not above it must not become live by itself."""
    return max((sequence_of(switch.version) for switch in history.switches), default=0)


def previous(history: History) -> str:
    """The version that was live before the one that is, empty when there was none."""
    live = history.switches[-1].version if history.switches else ""
    return next((switch.version for switch in reversed(history.switches) if switch.version != live), "")


def superfluous(versions: Iterable[str], history: History, keep: int | None) -> list[str]:
    """The versions beyond the newest `keep`, oldest first; never the live one, the one before it, or a pinned one."""
    if keep is None:
        return []
    live = {switch.version for switch in history.switches[-1:]}
    protected = {*live, previous(history), *history.pinned}
    return [version for version in sorted(versions, key=sequence_of)[:-keep] if version not in protected]
