"""What holds of a service that is idle again, whatever happened to it: written once, for every test of this suite."""

import hashlib
import json
import os
import stat
from collections import Counter
from pathlib import Path

import msgspec
from harness import Service

from retraind.job import FINAL_STATES, Job, JobState
from retraind.report import Manifest
from retraind.supervisor.versions import damage, version_dirs

NAME = "telemetry_autoencoder"


def datasets(spool: Path) -> Counter[bytes]:
    """The content of every dataset anywhere in the spool, with the number of places where it lies."""
    found: Counter[bytes] = Counter()
    for pattern in ("incoming/*", "active/*/*", "done/*", "quarantine/*"):
        for path in spool.glob(pattern):
            if not path.name.startswith(".") and not path.name.endswith(".reason.json"):
                found[path.read_bytes()] += 1
    return found


def consumer_sees(models: Path) -> Manifest | None:
    """What somebody who opens the known path gets: nothing, or weights that hash to their manifest's sha256."""
    link = models / f"{NAME}.pt"
    if not os.path.lexists(link):
        return None
    weights = link.read_bytes()
    current = models / NAME / "current"
    manifest = msgspec.json.decode((current / "manifest.json").read_bytes(), type=Manifest)
    assert hashlib.sha256(weights).hexdigest() == manifest.weights_sha256, "weights of another version"
    assert len(weights) == manifest.weights_bytes
    assert os.readlink(current) == f"versions/{manifest.version}"
    return manifest


def manifests(models: Path) -> list[Manifest]:
    found = [
        msgspec.json.decode(path.read_bytes(), type=Manifest) for path in models.glob("*/versions/[!.]*/manifest.json")
    ]
    return sorted(found, key=lambda manifest: manifest.sequence)


def records(state: Path) -> list[Job]:
    """Every job on disk: each of them can be read."""
    directories = sorted((state / "jobs").iterdir())
    return [msgspec.json.decode((path / "job.json").read_bytes(), type=Job) for path in directories]


def left_overs(service: Service) -> list[str]:
    """What nobody needs: temporary names, half-built versions, empty claims, work of ended jobs."""
    found = []
    rejected = {job.id for job in records(service.state) if job.state is JobState.REJECTED}
    for tree in (service.spool, service.models, service.state):
        for path in tree.rglob("*"):
            is_work = path.name == "work" and path.parent.name not in rejected
            is_hidden = path.name.startswith(".") and path.name != ".lock"
            if is_hidden or is_work or path.parent == service.spool / "active":
                found.append(str(path.relative_to(service.root)))
    return sorted(found)


def check_disk(service: Service, dropped: dict[str, bytes], published: set[str]) -> None:
    """After a clean stop: `dropped` by name, and the names of those whose content has a version of its own."""
    assert datasets(service.spool) == Counter(dropped.values()), "each dataset in exactly one place, with its bytes"
    ended = Counter(path.read_bytes() for place in ("done", "quarantine") for path in (service.spool / place).iterdir())
    assert not Counter(dropped.values()) - ended, "each dataset filed"
    for path in (service.spool / "quarantine").glob("*.reason.json"):
        assert json.loads(path.read_bytes())["code"]
        assert path.with_name(path.name.removesuffix(".reason.json")).exists(), "a reason beside its dataset"
    jobs = records(service.state)
    assert {job.state for job in jobs} <= FINAL_STATES
    versions = manifests(service.models)
    wanted = Counter(hashlib.sha256(dropped[name]).hexdigest() for name in published)
    assert Counter(version.dataset.sha256 for version in versions) == wanted, "each content published exactly once"
    assert [version.sequence for version in versions] == list(range(1, len(versions) + 1))
    assert [damage(path) for path in version_dirs(service.models / NAME)] == [""] * len(versions), "every file whole"
    assert {version.version for version in versions} == {job.version for job in jobs if job.version}
    live = consumer_sees(service.models)
    assert (live.sequence if live else 0) == len(versions)
    assert left_overs(service) == []
    assert _modes(service) == {"incoming": 0o3730, "versions": 0o755, "jobs": 0o750}


def _modes(service: Service) -> dict[str, int]:
    """Producers and consumers are other users: a directory with another mode is as good as none."""
    paths = (service.incoming, service.models / NAME / "versions", service.state / "jobs")
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}


def check_idle(service: Service) -> None:
    """While it runs, idle: what it says of itself agrees with the disk."""
    assert service.status()["state"] == "idle"
    assert service.status()["faults"] == {}
    assert service.metric("retraind_ready") == 1
    faults = [line for line in service.get("/metrics").splitlines() if line.startswith("retraind_fault{")]
    assert faults
    assert all(line.endswith(" 0.0") for line in faults), faults
    live = consumer_sees(service.models)
    assert service.status()["live_version"] == (live.version if live else "")
    if live is not None:
        assert service.metric("retraind_model_info", version=live.version) == 1


def check(service: Service, dropped: dict[str, bytes], published: set[str]) -> None:
    """Of an idle service, which is stopped by it."""
    check_idle(service)
    assert service.stop() == 0
    check_disk(service, dropped, published)
