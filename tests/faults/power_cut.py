"""A model of a filesystem with delayed writes: which trees a power cut may leave at any call of a life.

What POSIX leaves open is open here. A file's bytes are certain up to its last fsync; later ones may be absent, cut, or
there. A name (create, rename, link, unlink, mkdir, rmdir, symlink) is certain once one of the directories that the call
touched has been synced; until then it may be kept or not, each for itself, as long as it is possible without the
others: a rename of a name that was not kept is not kept either. A rename is atomic. A directory's mode is certain once
it was synced itself.
"""

import base64
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Entry = tuple["Node", str]
# For the call it is asked about: is this pending change kept, and how much of these pending bytes.
Choice = Callable[[], float]


@dataclass(eq=False)
class Node:
    """A file, a directory (`names` is not None) or a link."""

    mode: int = 0o755
    data: bytes = b""
    synced: bytes = b""
    synced_mode: int = 0o755
    link: str | None = None
    names: dict[str, "Node"] | None = None  # as the running system sees them
    kept: dict[str, "Node"] = field(default_factory=dict)  # as they are on the disk for certain
    mtime_ns: int | None = None


@dataclass
class Change:
    """One atomic change of names: what goes, what comes."""

    gone: list[tuple[Node, str, Node]]
    come: list[tuple[Node, str, Node]]

    def touches(self, directory: Node) -> bool:
        return any(place is directory for place, _, _ in (*self.gone, *self.come))

    def is_possible(self) -> bool:
        return all(place.kept.get(name) is node for place, name, node in self.gone)

    def keep(self) -> None:
        for place, name, node in self.gone:
            if place.kept.get(name) is node:
                del place.kept[name]
        for place, name, node in self.come:
            place.kept[name] = node


class Machine:
    """The running system and its disk, call by call. The root is there for certain."""

    def __init__(self) -> None:
        self.root = Node(names={})
        self.pending: list[Change] = []
        self.inodes: dict[int, Node] = {}

    def find(self, path: str) -> Node:
        node = self.root
        for name in path.split("/") if path != "." else ():
            assert node.names is not None, path
            node = node.names[name]
        return node

    def place(self, path: str) -> Entry:
        head, _, name = path.rpartition("/")
        return self.find(head or "."), name

    def apply(self, call: dict[str, Any]) -> None:
        """One recorded call."""
        path = call["path"]
        match call["operation"]:
            case "create":
                self.inodes[call["inode"]] = self._add(path, Node(mode=call["mode"]))
            case "mkdir":
                self._add(path, Node(mode=call["mode"], synced_mode=call["mode"], names={}))
            case "symlink":
                self._add(path, Node(link=call["link"]))
            case "drop":  # by a producer who syncs the file and its name
                data = base64.b64decode(call["data"])
                node = self._add(path, Node(0o644, data, data, mtime_ns=call["mtime_ns"]))
                self.pending.pop().keep()
                assert node.synced == data
            case "write":
                self.inodes[call["inode"]].data += base64.b64decode(call["data"])
            case "fsync":
                node = self.inodes[call["inode"]]
                node.synced, node.synced_mode = node.data, node.mode
            case "fsync_dir":
                self._sync_dir(self.find(path))
            case "chmod":
                self.find(path).mode = call["mode"]
            case "unlink" | "rmdir":
                place, name = self.place(path)
                self._change([(place, name, place.names[name])], [])
            case "rename":
                self._rename(path, call["target"])
            case "link":
                self._add(call["target"], self.find(path))
            case "open":
                pass  # of a lock; what is written over would make the replay differ from the disk

    def _add(self, path: str, node: Node) -> Node:
        place, name = self.place(path)
        self._change([], [(place, name, node)])
        return node

    def _rename(self, source: str, target: str) -> None:
        (place, name), (new_place, new_name) = self.place(source), self.place(target)
        node = place.names[name]
        self._change([(place, name, node)], [(new_place, new_name, node)])

    def _change(self, gone: list[tuple[Node, str, Node]], come: list[tuple[Node, str, Node]]) -> None:
        for place, name, _ in gone:
            del place.names[name]
        for place, name, node in come:
            place.names[name] = node
        self.pending.append(Change(gone, come))

    def _sync_dir(self, directory: Node) -> None:
        directory.synced_mode = directory.mode
        rest = []
        for change in self.pending:
            if change.touches(directory):
                change.keep()
            else:
                rest.append(change)
        self.pending = rest

    def cut(self, choose: Choice) -> None:
        """The power fails: of what is not certain, that is kept which `choose` says (0 no, 1 yes)."""
        for change in self.pending:
            if choose() >= 0.5 and change.is_possible():
                change.keep()
        self.pending = []
        for node in _walk(self.root):
            if node.names is not None and node.mode != node.synced_mode and choose() < 0.5:
                node.mode = node.synced_mode
            if node.data != node.synced:
                assert node.data.startswith(node.synced)
                node.data = node.data[: len(node.synced) + int((len(node.data) - len(node.synced)) * choose())]

    def tree(self) -> dict[str, tuple[Any, ...]]:
        """What is on the disk after the cut: the path, and for a file its bytes, for a link where it points."""
        return dict(_listed(self.root, ""))


def _walk(node: Node) -> Iterator[Node]:
    yield node
    if node.names is not None:
        for child in node.kept.values():
            yield from _walk(child)


def _listed(node: Node, path: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, child in sorted(node.kept.items()):
        below = f"{path}{name}"
        if child.names is not None:
            yield below, ("directory", child.mode)
            yield from _listed(child, below + "/")
        elif child.link is not None:
            yield below, ("link", child.link)
        else:
            yield below, ("file", child.mode, child.data, child.mtime_ns)


def make(tree: dict[str, tuple[Any, ...]], root: Path) -> None:
    """Lays a tree out below `root`."""
    for below, (kind, *facts) in tree.items():
        path = root / below
        if kind == "directory":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(facts[0])
        else:
            path.write_bytes(facts[1])
            path.chmod(facts[0])
            if facts[2] is not None:
                os.utime(path, ns=(facts[2], facts[2]))
    for below, (kind, *facts) in tree.items():
        if kind == "directory":
            (root / below).chmod(facts[0])


def name_of(tree: dict[str, tuple[Any, ...]]) -> str:
    """A digest: two cuts that leave the same tree are one."""
    return hashlib.sha256(repr(sorted(tree.items())).encode()).hexdigest()[:16]


def replayed(calls: list[dict[str, Any]]) -> Machine:
    machine = Machine()
    for call in calls:
        machine.apply(call)
    return machine


def cuts(
    calls: list[dict[str, Any]], seed: str, num_random: int
) -> Iterator[tuple[int, str, dict[str, tuple[Any, ...]]]]:
    """Every cut: after how many calls, what was kept, and the tree."""
    for number in range(len(calls) + 1):
        for kind in ("all", "none", *map(str, range(num_random))):
            rng = random.Random(f"{seed} {number} {kind}")
            machine = replayed(calls[:number])
            if kind.isdecimal():
                machine.cut(
                    lambda rng=rng: rng.choice((0.0, 0.5, 1.0)) if rng.random() < 0.3 else float(rng.random() < 0.5)
                )
            else:
                machine.cut(lambda kind=kind: float(kind == "all"))
            yield number, kind, machine.tree()
