"""The models directory: one rename is the commit, a version never changes, and no fault takes the live one away."""

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from builders import JOB_ID, LATER, NOW, OTHER_ID, make_candidate
from disk_faults import CODES, DiskFault, any_change, synced

from retraind import fsio
from retraind.errors import PublishError
from retraind.report import Check, Criterion, Manifest
from retraind.supervisor.build import CandidateDamaged
from retraind.supervisor.publish import Publisher
from retraind.supervisor.versions import list_versions, read_manifest, version_dirs

NAME = "telemetry_autoencoder"
WAIT_SECONDS = 120


@pytest.fixture
def narrow_umask() -> Iterator[None]:
    old = os.umask(0o077)
    yield
    os.umask(old)


def publish(publisher: Publisher, weights: bytes, job_id: str = JOB_ID) -> Manifest:
    """As the service does with what a worker left."""
    path = publisher.models_dir.parent / f"work-{job_id}.pt"
    path.write_bytes(weights)
    return publisher.publish(make_candidate(weights), path, job_id, NOW)


def live(publisher: Publisher) -> bytes:
    """What a consumer reads; the manifest beside it is of the same version and names the same bytes."""
    weights = publisher.link.read_bytes()
    manifest = read_manifest(publisher.current)
    assert manifest is not None
    assert fsio.sha256_of_bytes(weights) == manifest.weights_sha256
    return weights


def tree(publisher: Publisher) -> list[str]:
    """Every name below the models directory but the lock."""
    paths = (path.relative_to(publisher.models_dir) for path in publisher.models_dir.rglob("*"))
    return sorted(str(path) for path in paths if path.name != ".lock")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.usefixtures("narrow_umask")
def test_the_first_publication_lays_out_the_directory_for_every_user(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "models", NAME)
    publisher.open()
    manifest = publish(publisher, b"one")
    version = f"000001-{fsio.sha256_of_bytes(b'one')[:12]}"
    assert manifest.version == version
    home = f"{NAME}/versions/{version}"
    assert tree(publisher) == sorted([
        NAME, f"{NAME}.pt", f"{NAME}/current", f"{NAME}/history.json", f"{NAME}/versions",
        home, f"{home}/manifest.json", f"{home}/report.html", f"{home}/weights.pt",
    ])  # fmt: skip
    assert os.readlink(publisher.link) == f"{NAME}/current/weights.pt"
    assert os.readlink(publisher.current) == f"versions/{version}"
    for directory in (publisher.models_dir, publisher.home, publisher.versions_dir, publisher.versions_dir / version):
        assert mode_of(directory) == 0o755, directory
    assert mode_of(publisher.home / "history.json") == 0o644
    for name in ("weights.pt", "manifest.json", "report.html"):
        assert mode_of(publisher.versions_dir / version / name) == 0o444, name
    assert live(publisher) == b"one"


def test_the_manifest_holds_what_was_measured(publisher: Publisher) -> None:
    manifest = publish(publisher, b"one")
    candidate = make_candidate(b"one")
    assert publisher.live() == manifest
    assert manifest.job == JOB_ID
    assert (manifest.sequence, manifest.model_name, manifest.published_at) == (1, NAME, NOW)
    for field in ("weights_sha256", "weights_bytes", "shape", "scaler", "dataset", "training", "evaluation"):
        assert getattr(manifest, field) == getattr(candidate, field), field
    assert manifest.metric_names == ["cpu", "load"]
    text = json.loads((publisher.current / "manifest.json").read_text())
    assert text["published_at"] == "2026-11-30T22:52:12Z"
    assert text["schema"] == 1


def test_the_manifest_keeps_what_preflight_and_gate_looked_at(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "one.pt").write_bytes(b"one")
    checks = [Check(name="host.disk", status="warn", message="900 MiB free", remedy="make room")]
    criteria = [Criterion(code="non_finite_weights", passed=True, message="every weight is finite")]
    publisher.publish(make_candidate(b"one", checks=checks), tmp_path / "one.pt", JOB_ID, NOW, gate=criteria)
    manifest = publisher.live()
    assert manifest is not None
    assert (manifest.gate, manifest.checks) == (criteria, checks)


def test_the_next_publication_becomes_live_and_the_old_one_stays_as_it_was(publisher: Publisher) -> None:
    first = publish(publisher, b"one")
    before = {path: path.read_bytes() for path in (publisher.versions_dir / first.version).iterdir()}
    second = publish(publisher, b"two", OTHER_ID)
    assert (second.sequence, live(publisher), publisher.live_version()) == (2, b"two", second.version)
    assert {path: path.read_bytes() for path in before} == before
    assert list_versions(publisher.home) == [first, second]


def test_versions_are_counted_on_beyond_six_digits(publisher: Publisher) -> None:
    for name in ("999999-aaaaaaaaaaaa", "000002-bbbbbbbbbbbb", "notes", "x-1"):
        (publisher.versions_dir / name).mkdir()
    assert publish(publisher, b"one").version.startswith("1000000-")
    assert version_dirs(publisher.home)[-1].name.startswith("1000000-")


def test_publishing_a_job_again_makes_no_second_version(publisher: Publisher) -> None:
    first = publish(publisher, b"one")
    again = publisher.publish(make_candidate(b"one"), publisher.link, JOB_ID, LATER)
    assert again == first
    assert list_versions(publisher.home) == [first]


def test_a_version_that_a_crash_left_uncommitted_is_committed_and_not_built_again(publisher: Publisher) -> None:
    publish(publisher, b"one")
    second = publish(publisher, b"two", OTHER_ID)
    fsio.replace_link(publisher.current, f"versions/{version_dirs(publisher.home)[0].name}")
    assert publish(publisher, b"two", OTHER_ID) == second
    assert live(publisher) == b"two"
    assert len(version_dirs(publisher.home)) == 2


def test_the_same_weights_of_another_job_are_a_version_of_their_own(publisher: Publisher) -> None:
    versions = [publish(publisher, b"one", job_id).version for job_id in (JOB_ID, OTHER_ID)]
    assert [version[:7] for version in versions] == ["000001-", "000002-"]
    assert publisher.live_version() == versions[1]


def test_weights_that_changed_after_they_were_measured_are_not_published(publisher: Publisher) -> None:
    publish(publisher, b"one")
    before = tree(publisher)
    damaged = publisher.models_dir.parent / "damaged.pt"
    damaged.write_bytes(b"twO")
    with pytest.raises(CandidateDamaged, match=OTHER_ID):
        publisher.publish(make_candidate(b"two"), damaged, OTHER_ID, NOW)
    assert live(publisher) == b"one"
    assert tree(publisher) == before


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
@pytest.mark.parametrize("is_first", [True, False], ids=["first publication", "next publication"])
def test_a_fault_at_any_step_leaves_the_live_version_whole_and_a_retry_works(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_first: bool
) -> None:
    """Every call that changes the disk fails once, one after the other, each on a directory of its own."""
    steps = []
    for nth in range(1, 100):
        publisher = Publisher(tmp_path / str(nth) / "models", NAME)
        publisher.open()
        if not is_first:
            publish(publisher, b"one")
        weights = tmp_path / "two.pt"
        weights.write_bytes(b"two")
        disk = DiskFault(code, any_change, nth)
        with monkeypatch.context() as patch:
            disk.install(patch)
            try:
                publisher.publish(make_candidate(b"two"), weights, OTHER_ID, NOW)
            except PublishError as error:
                assert error.__cause__ is disk.error
                assert error.code == ("disk_full" if code == CODES["ENOSPC"] else "models_dir_unwritable")
        if not disk.failed_at:
            break
        steps.append(disk.failed_at.partition("(")[0])
        hidden = [name for name in tree(publisher) if "/." in name or name.startswith(".")]
        assert hidden == [], disk.failed_at
        if is_first:
            assert not publisher.link.exists() or live(publisher) == b"two"
        else:
            assert live(publisher) in (b"one", b"two")
        assert publish(publisher, b"two", OTHER_ID).job == OTHER_ID
        assert live(publisher) == b"two"
        assert len(version_dirs(publisher.home)) == (1 if is_first else 2), disk.failed_at
    assert {"open", "write", "fsync", "fchmod", "mkdir", "chmod", "rename", "symlink", "replace"} == set(steps)
    assert steps.count("fsync") >= 6


def test_a_retry_syncs_what_an_earlier_try_could_not(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is in place after the first try, but a power cut could still undo it: the retry makes it durable."""
    publish(publisher, b"one")
    paths = synced(monkeypatch, lambda: publish(publisher, b"one"))
    assert paths == [str(publisher.versions_dir), str(publisher.home), str(publisher.models_dir)]


def test_what_reads_back_otherwise_is_not_published(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes the bytes and gives others back."""
    publish(publisher, b"one")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, bytes(data).replace(b"two", b"twO")))
        with pytest.raises(PublishError, match="read back other bytes"):
            publish(publisher, b"two", OTHER_ID)
    assert live(publisher) == b"one"
    assert len(version_dirs(publisher.home)) == 1


def test_a_left_over_of_a_crash_is_swept_at_the_next_start(publisher: Publisher) -> None:
    publish(publisher, b"one")
    left_over = publisher.versions_dir / ".new-000002-aaaaaaaaaaaa-deadbeef"
    left_over.mkdir()
    (left_over / "weights.pt").write_bytes(b"half")
    assert len(list_versions(publisher.home)) == 1
    publisher.open()
    assert not left_over.exists()
    assert live(publisher) == b"one"


def plant_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def plant_broken_link(path: Path, _victim: Path) -> None:
    path.symlink_to("nowhere")


def plant_directory(path: Path, victim: Path) -> None:
    path.mkdir()
    os.link(victim, path / "inside")


def plant_fifo(path: Path, _victim: Path) -> None:
    os.mkfifo(path)


# `current` is a link anyway: one with another target is an older version, or a roll-back by hand.
@pytest.mark.parametrize(
    ("place", "plant"),
    [
        ("link", plant_link), ("link", plant_broken_link), ("link", plant_directory), ("link", plant_fifo),
        ("current", plant_directory), ("current", plant_fifo),
    ],
)  # fmt: skip
def test_what_somebody_else_put_in_our_place_is_not_touched(
    place: str, plant: Callable[[Path, Path], None], publisher: Publisher, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = getattr(publisher, place)
    if place == "current":
        publish(publisher, b"one", OTHER_ID)
        path.unlink()
    plant(path, victim)
    planted = path.lstat()
    for attempt in (publisher.open, publisher.check, lambda: publish(publisher, b"two")):
        with pytest.raises(PublishError, match="move it away") as caught:
            attempt()
        assert caught.value.code == "path_taken"
    assert (path.lstat().st_ino, path.lstat().st_mode) == (planted.st_ino, planted.st_mode)
    assert victim.read_bytes() == b"precious"


def test_a_weights_file_from_before_is_kept_and_replaced_by_the_link(publisher: Publisher) -> None:
    publisher.link.write_bytes(b"made by hand")
    publisher.check()
    publish(publisher, b"one")
    assert live(publisher) == b"one"
    kept = publisher.home / f"before-{fsio.sha256_of_bytes(b'made by hand')[:12]}.pt"
    assert kept.read_bytes() == b"made by hand"


def test_a_weights_file_of_another_owner_is_copied_where_it_can_not_be_linked(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fs.protected_hardlinks has it for a file that is not the service's own."""
    publisher.link.write_bytes(b"made by hand")
    with monkeypatch.context() as patch:
        disk = DiskFault(errno.EPERM, lambda name, args: name == "link")
        disk.install(patch)
        publish(publisher, b"one")
    assert disk.failed_at
    assert live(publisher) == b"one"
    kept = publisher.home / f"before-{fsio.sha256_of_bytes(b'made by hand')[:12]}.pt"
    assert kept.read_bytes() == b"made by hand"


@pytest.mark.parametrize("place", ["models_dir", "home", "versions_dir"])
def test_a_file_in_the_place_of_a_directory_is_the_machines_fault(place: str, tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "models", NAME)
    path = getattr(publisher, place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"in the way")
    with pytest.raises(PublishError, match=r"check models\.dir") as caught:
        publisher.open()
    assert caught.value.code == "models_dir_unwritable"
    assert path.read_bytes() == b"in the way"


def test_a_directory_that_went_away_is_named(publisher: Publisher) -> None:
    publisher.versions_dir.rmdir()
    with pytest.raises(PublishError, match="versions: not a directory"):
        publisher.check()


def test_a_missing_candidate_is_the_machines_fault(publisher: Publisher, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="gone.pt: No such file"):
        publisher.publish(make_candidate(), tmp_path / "gone.pt", JOB_ID, NOW)


def test_another_process_that_publishes_is_waited_for(publisher: Publisher) -> None:
    code = (
        "import fcntl, os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\nfcntl.flock(fd, fcntl.LOCK_EX)\n"
        "print(flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(publisher.home / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        with pytest.raises(PublishError, match="another process publishes") as caught:
            publish(publisher, b"one")
        assert caught.value.code == "locked"
        assert not publisher.link.exists()
        process.communicate()
    assert publish(publisher, b"one").sequence == 1


def test_nothing_published_is_told_as_such(publisher: Publisher) -> None:
    assert (publisher.live(), publisher.live_version(), list_versions(publisher.home)) == (None, "", [])
    assert version_dirs(publisher.models_dir / "no such model") == []


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"version": 3}'])
def test_a_damaged_manifest_is_passed_over_and_its_number_not_used_again(text: bytes, publisher: Publisher) -> None:
    first = publish(publisher, b"one")
    path = publisher.versions_dir / first.version / "manifest.json"
    path.chmod(0o644)
    path.write_bytes(text)
    assert publisher.live() is None
    assert list_versions(publisher.home) == []
    assert publish(publisher, b"two", OTHER_ID).sequence == 2


def test_a_manifest_of_a_newer_version_is_still_read(publisher: Publisher) -> None:
    first = publish(publisher, b"one")
    path = publisher.versions_dir / first.version / "manifest.json"
    record = json.loads(path.read_text())
    path.chmod(0o644)
    path.write_bytes(msgspec.json.encode({**record, "signature": "abc"}))
    assert publisher.live() == first


# A consumer as the documentation asks for one: `current` is resolved once, and everything is read from there.
READER = """
import hashlib, json, os, sys
from pathlib import Path
models, name, stop = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
versions, problems, num_reads = set(), [], 0
print(flush=True)
while not stop.exists():
    try:
        version = Path(os.path.realpath(models / name / "current"))
        manifest = json.loads((version / "manifest.json").read_bytes())
        digest = hashlib.sha256((version / "weights.pt").read_bytes()).hexdigest()
        if (manifest["version"], manifest["weights_sha256"]) != (version.name, digest):
            problems.append(f"{version}: weights and manifest do not belong together")
        (models / f"{name}.pt").read_bytes()
        versions.add(version.name)
        num_reads += 1
    except Exception as error:
        problems.append(repr(error))
print(json.dumps({"num_reads": num_reads, "num_versions": len(versions), "problems": problems[:5]}))
"""


def test_a_reader_never_sees_a_missing_file_or_a_mixture(publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, b"0" * 10_000)
    stop = tmp_path / "stop"
    command = [sys.executable, "-c", READER, str(publisher.models_dir), NAME, str(stop)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "\n"
        try:
            for number in range(1, 201):
                publish(publisher, b"%d" % number * 10_000, f"job-{number}")
        finally:
            stop.touch()
        found = json.loads(reader.communicate(timeout=WAIT_SECONDS)[0])
    assert found["problems"] == []
    assert found["num_versions"] > 1, "it read while it was published"
    assert publisher.live_version().startswith("000201-")
