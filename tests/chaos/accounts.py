"""What was dropped against what lies there: every byte accounted for, every good content published exactly once."""

import hashlib
import json
import os
import stat
from collections import Counter

from harness import Service, eventually

_REASON = b".reason.json"
_FINAL = {"published", "duplicate", "rejected", "quarantined"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fingerprint(path: bytes) -> str:
    """What an entry is: a file by its content, anything else by its kind."""
    mode = os.lstat(path).st_mode
    if stat.S_ISREG(mode):
        with open(path, "rb") as file:
            return sha256(file.read())
    return f"link to {os.readlink(path)!r}" if stat.S_ISLNK(mode) else f"kind {stat.S_IFMT(mode):o}"


class Accounts:
    """Notes each drop, and compares at the end. `good` are contents of which a model must have come."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.good: set[str] = set()

    def note(self, data: bytes, *, is_good: bool = True) -> None:
        self.dropped[sha256(data)] += 1
        if is_good:
            self.good.add(sha256(data))

    def note_other(self, path: bytes) -> None:
        """A link, a pipe or a directory."""
        self.dropped[fingerprint(path)] += 1

    def check(self, service: Service) -> None:
        """Once nothing waits: nothing is lost, nothing is published twice, nothing half done is left."""
        found = lying(service)
        extra = [path for path in paths_in(service) if fingerprint(path) in found - self.dropped]
        assert found == self.dropped, f"the contents that were dropped are those that lie in the spool, beside {extra}"
        published = versions(service)
        times = Counter(str(version["dataset"]["sha256"]) for version in published)
        assert times.keys() == self.good, "a model came of each good content, and of nothing else"
        assert {content: number for content, number in times.items() if number != 1} == {}, "published twice"
        assert [version["sequence"] for version in published] == list(range(1, len(published) + 1))
        unfinished = {str(job["id"]): job["state"] for job in service.jobs() if job["state"] not in _FINAL}
        assert unfinished == {}
        assert sum(job["state"] == "published" for job in service.jobs()) == len(published)
        # The last job's work directory goes just after its claim.
        eventually(lambda: not left_over(service), "nothing half done is left, as `left_over` names it", seconds=30)


def settle(service: Service, seconds: float) -> None:
    """Waits until no file and no claim waits any more."""

    def is_settled() -> bool:
        return not os.listdir(service.incoming) and not os.listdir(service.spool / "active")

    eventually(is_settled, "every file has come to its end", seconds=seconds)


def lying(service: Service) -> Counter[str]:
    """Everything in the spool that came from a producer."""
    return Counter(map(fingerprint, paths_in(service)))


def paths_in(service: Service) -> list[bytes]:
    """All that lies in the spool, reasons left out."""
    spool = os.fsencode(service.spool)
    claims = [os.path.join(spool, b"active", name) for name in os.listdir(os.path.join(spool, b"active"))]
    directories = [*(os.path.join(spool, name) for name in (b"incoming", b"done", b"quarantine")), *claims]
    paths = (os.path.join(directory, name) for directory in directories for name in os.listdir(directory))
    return [path for path in paths if not path.endswith(_REASON)]


def versions(service: Service) -> list[dict[str, object]]:
    """The manifest of every version, each held against its files, in order."""
    found = []
    for directory in (service.models / "telemetry_autoencoder" / "versions").iterdir():
        manifest = json.loads((directory / "manifest.json").read_text())
        assert manifest["version"] == directory.name
        assert sha256((directory / "weights.pt").read_bytes()) == manifest["weights_sha256"], directory
        for sibling in manifest["siblings"]:
            assert sha256((directory / sibling["name"]).read_bytes()) == sibling["sha256"], directory / sibling["name"]
        found.append(manifest)
    return sorted(found, key=lambda manifest: manifest["sequence"])


def left_over(service: Service) -> list[str]:
    """Names that only a half finished step leaves: temporary files, hidden versions, reasons without their file."""
    quarantine = os.fsencode(service.spool / "quarantine")
    names = set(os.listdir(quarantine))
    orphans = [name for name in names if name.endswith(_REASON) and name.removesuffix(_REASON) not in names]
    temporary = [path for root in (service.state, service.models) for path in root.rglob(".*") if path.name != ".lock"]
    hidden = [name for name in names if name.startswith(b".")]
    # Below jobs/<id>/ is only the record, and for a rejected one its candidate.
    kept = {str(job["id"]) for job in service.jobs() if job["state"] == "rejected"}
    work = [path for path in (service.state / "jobs").glob("*/work") if path.parent.name not in kept]
    return sorted(map(str, [*orphans, *temporary, *hidden, *work]))
