"""What a consumer reads is whole and of one version, whatever becomes of the directory meanwhile."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import LATER, NOW, make_candidate

from retraind import consumer
from retraind.consumer import Damaged, NotPublished, open_live
from retraind.supervisor.publish import Publisher

NAME = "telemetry_autoencoder"
WAIT_SECONDS = 120


def publish(publisher: Publisher, number: int) -> str:
    weights = b"%d" % number * 5_000
    path = publisher.models_dir.parent / "work.pt"
    path.write_bytes(weights)
    return publisher.publish(make_candidate(weights), path, f"job-{number}", NOW).version


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "_FIRST_PAUSE_SECONDS", 0.0)


def test_the_live_version_is_read_with_its_manifest(publisher: Publisher) -> None:
    publish(publisher, 1)
    version = publish(publisher, 2)
    found = open_live(publisher.models_dir)
    assert found.version == found.manifest["version"] == version
    assert found.weights == b"2" * 5_000
    assert open_live(str(publisher.models_dir), NAME) == found


@pytest.mark.usefixtures("impatient")
def test_nothing_published_is_told_as_such(publisher: Publisher) -> None:
    with pytest.raises(NotPublished, match="nothing is published there"):
        open_live(publisher.models_dir)
    with pytest.raises(NotPublished, match="nowhere"):
        open_live("/nowhere", NAME)


@pytest.mark.parametrize("damage", ["flip", "cut", "manifest", "no key"])
def test_damage_is_told_and_not_retried(publisher: Publisher, damage: str) -> None:
    version_dir = publisher.versions_dir / publish(publisher, 1)
    path = version_dir / ("weights.pt" if damage in ("flip", "cut") else "manifest.json")
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes({"flip": b"X" + data[1:], "cut": data[:-1], "manifest": data[:-9], "no key": b"{}"}[damage])
    with pytest.raises(Damaged, match=version_dir.name):
        open_live(publisher.models_dir)


def test_a_version_that_goes_between_two_looks_is_noticed_and_the_next_one_read(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(publisher, 1)
    real = os.open

    def late(path: object, *args: object, **keywords: object) -> int:
        if str(path).endswith("-" + publisher.live_version().partition("-")[2]) and publisher.live_version()[5] == "1":
            for number in (2, 3, 4):
                publish(publisher, number)
            publisher.prune(1, LATER)
        return real(path, *args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(consumer.os, "open", late)
    assert open_live(publisher.models_dir).weights == b"4" * 5_000


def test_the_module_works_as_a_copy_without_the_package(publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, 1)
    (tmp_path / "my_consumer.py").write_text(Path(consumer.__file__).read_text())
    script = f"import my_consumer; print(my_consumer.open_live({str(publisher.models_dir)!r}).version)"
    command = [sys.executable, "-S", "-E", "-W", "error", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True)
    assert done.stdout.strip() == publisher.live_version()


READER = """
import json, sys
from pathlib import Path
from retraind.consumer import open_live
models, stop = sys.argv[1], Path(sys.argv[2])
versions, problems, num_reads = set(), [], 0
print(flush=True)
while not stop.exists():
    try:
        found = open_live(models)
        if found.manifest["version"] != found.version or len(set(found.weights)) > 4:
            problems.append(found.version)
        versions.add(found.version)
        num_reads += 1
    except Exception as error:
        problems.append(repr(error))
print(json.dumps({"num_reads": num_reads, "num_versions": len(versions), "problems": problems[:5]}))
"""


def test_consumers_read_whole_versions_through_a_thousand_switches_and_their_removal(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without fsync: this is about names, and the faster they change the harder it is for the readers."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    publish(publisher, 0)
    stop = tmp_path / "stop"
    command = [sys.executable, "-c", READER, str(publisher.models_dir), str(stop)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        assert [reader.stdout.readline() for reader in readers] == ["\n"] * 3
        for number in range(1, 801):
            publish(publisher, number)
            if number % 4 == 0:
                publisher.rollback("", LATER)
            publisher.prune(1, LATER)
    finally:
        stop.touch()
        found = [json.loads(reader.communicate(timeout=WAIT_SECONDS)[0]) for reader in readers]
    for one in found:
        assert one["problems"] == []
        assert one["num_versions"] > 1, "it read while it was published"
    assert len(list(publisher.versions_dir.iterdir())) <= 3
