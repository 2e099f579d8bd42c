"""A power cut at any call of a life, with whatever a filesystem may have kept: the next start goes on."""

import base64
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import eventually
from invariants import check, consumer_sees, datasets
from life import ALL_POINTS, SEED, Life, Zygote, in_lanes, living
from power_cut import cuts, make, name_of, replayed

DROPPED = {"a.csv": b"a.csv", "b.csv": b"b.csv", "refuse.csv": b"refuse.csv"}
PUBLISHED = {"a.csv", "b.csv"}
NUM_RANDOM = 6 if ALL_POINTS else 2
# How many of the different trees get a start of the service; what a consumer sees is checked on all of them.
NUM_STARTED = 40


def drop(life: Life, name: str, data: bytes) -> None:
    """A dataset that its producer has synced with its name: from here the service answers for it."""
    staged = life.root / f"staged-{name}"
    staged.write_bytes(data)
    call = {
        "operation": "drop", "path": f"spool/incoming/{name}", "data": base64.b64encode(data).decode(),
        "mtime_ns": staged.stat().st_mtime_ns,
    }  # fmt: skip
    with life.calls_path.open("ab", buffering=0) as log:
        log.write(json.dumps(call).encode() + b"\n")
    staged.rename(life.incoming / name)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A whole life from an empty disk: start, two publications, a refusal, stop. Its replay is what is on the disk."""
    zygote = Zygote()
    with living(tmp_path_factory.mktemp("power") / "recorded", zygote) as life:
        # A socket's name is not made by a call of the os module; it holds nothing and the next worker gets a new one.
        life.begin(wait=True, record=True, but=r"events\.sock", worker={"record": True})
        for name, data in DROPPED.items():
            drop(life, name, data)
            eventually(lambda name=name: name in life.names("done") + life.names("quarantine"), f"{name} filed")
        life.settle()
        assert life.stop() == 0
        found = life.calls()
        machine = replayed(found)
        machine.cut(lambda: 1.0)
        remade = life.root / "remade"
        remade.mkdir()
        make(machine.tree(), remade)
        for tree in ("spool", "models", "state"):
            left, right = _content(life.root / tree), _content(remade / tree)
            right.pop("trained.log", None)
            left.pop("trained.log", None)  # a test's own
            assert left == right, "a call that the launcher does not see"
    zygote.close()
    return found


def _content(root: Path) -> dict[str, object]:
    return {
        str(path.relative_to(root)): str(path.readlink()) if path.is_symlink() else path.is_dir() or path.read_bytes()
        for path in root.rglob("*")
        if not path.is_socket()
    }


def durable(calls: list[dict[str, Any]]) -> tuple[Counter[bytes], int]:
    """What the service answers for after these calls: the datasets, and how many versions it has called published."""
    dropped = Counter(base64.b64decode(call["data"]) for call in calls if call["operation"] == "drop")
    written = [base64.b64decode(call["data"]) for call in calls if call["operation"] == "write"]
    return dropped, len({data for data in written if b'"state":"published"' in data})


def test_after_a_power_cut_at_any_call_nothing_acknowledged_is_lost_and_the_service_goes_on(
    calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    different: dict[str, tuple[int, str, dict[str, tuple[Any, ...]]]] = {}
    for number, kind, tree in cuts(calls, str(SEED), NUM_RANDOM):
        # What is owed decides too: one tree after two different pasts is two cases.
        different.setdefault(f"{name_of(tree)} {durable(calls[:number])}", (number, kind, tree))
    assert len(different) > 100
    for number, kind, tree in different.values():
        root = tmp_path / "seen"
        root.mkdir()
        make(tree, root)
        dropped, num_published = durable(calls[:number])
        place = f"cut after call {number} of {len(calls)} ({kind} kept)"
        assert datasets(root / "spool") == dropped, place
        live = consumer_sees(root / "models")
        assert (live.sequence if live else 0) >= num_published, place
        shutil.rmtree(root)
    points = sorted(different.values(), key=lambda point: point[:2])
    if not ALL_POINTS:
        points = random.Random(SEED).sample(points, NUM_STARTED)

    def start(point: tuple[int, str, dict[str, tuple[Any, ...]]], zygote: Zygote) -> None:
        number, kind, tree = point
        dropped = {call["path"].rpartition("/")[2] for call in calls[:number] if call["operation"] == "drop"}
        with living(tmp_path / f"{number}-{kind}", zygote) as life:
            make(tree, life.root)
            life.begin(wait=True)
            life.settle()
            check(life, {name: DROPPED[name] for name in dropped}, PUBLISHED & dropped)

    in_lanes(points, start)
