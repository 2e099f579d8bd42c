"""Files that a worker leaves beside its weights: published, checked and read as the weights are, or not at all."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from builders import JOB_ID, NOW, OTHER_ID, leave_siblings, make_candidate

from retraind.consumer import Damaged, open_live
from retraind.report import Manifest, SiblingFile
from retraind.supervisor.build import CandidateDamaged
from retraind.supervisor.publish import Publisher
from retraind.supervisor.siblings import MAX_SIBLING_BYTES, MAX_SIBLINGS, unfit
from retraind.supervisor.versions import damage

FILES = {"window.json": b'{"window": 5}', "linear-v2.bin": b"\0" * 1000, "empty": b""}
SHA256 = "ab" * 32


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    (path / "weights.pt").write_bytes(b"weights")
    return path


def publish(publisher: Publisher, work_dir: Path, siblings: list[SiblingFile], job_id: str = JOB_ID) -> Manifest:
    return publisher.publish(make_candidate(siblings=siblings), work_dir / "weights.pt", job_id, NOW)


def test_what_the_worker_left_beside_its_weights_is_published_with_them(publisher: Publisher, work_dir: Path) -> None:
    (work_dir / "cache").write_bytes(b"not named, so not published")
    siblings = leave_siblings(work_dir, FILES)
    manifest = publish(publisher, work_dir, siblings)
    assert manifest.siblings[: len(siblings)] == siblings
    version_dir = publisher.versions_dir / manifest.version
    for name, data in FILES.items():
        assert (version_dir / name).read_bytes() == data
        assert stat.S_IMODE((version_dir / name).stat().st_mode) == 0o444
    assert not (version_dir / "cache").exists()
    assert damage(version_dir) == ""
    assert publisher.live() == manifest


def change(path: Path) -> None:
    path.write_bytes(b"X" + path.read_bytes()[1:])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"X")


@pytest.mark.parametrize("spoil", [change, lengthen, Path.unlink])
def test_a_file_that_is_not_the_one_that_was_measured_is_not_published_and_nothing_else_is(
    spoil: Callable[[Path], None], publisher: Publisher, work_dir: Path
) -> None:
    publish(publisher, work_dir, [])
    before = sorted(publisher.models_dir.rglob("*"))
    siblings = leave_siblings(work_dir, FILES)
    spoil(work_dir / "window.json")
    with pytest.raises(CandidateDamaged, match=rf"window\.json of job {OTHER_ID}"):
        publish(publisher, work_dir, siblings, OTHER_ID)
    assert sorted(publisher.models_dir.rglob("*")) == before


def of(*names: str, num_bytes: int = 1) -> list[SiblingFile]:
    return [SiblingFile(name=name, sha256=SHA256, num_bytes=num_bytes) for name in names]


@pytest.mark.parametrize(
    ("siblings", "words"),
    [
        *((of(name), "plain name") for name in ("", ".", "..", "../up", "a/b", "/etc/passwd", ".hidden", "a b", "a\n")),
        *((of(name), "plain name") for name in ("\xe4", "\ud800", "a\0", "x" * 101, "<b>", "a;b")),
        *((of(name), "keeps for") for name in ("weights.pt", "manifest.json", "report.html", "x.sig")),
        (of("a", num_bytes=MAX_SIBLING_BYTES + 1), "at most"), (of("a", num_bytes=-1), "at most"),
        (of("a", "a"), "different names"), (of(*map(str, range(MAX_SIBLINGS + 1))), "different names"),
    ],
)  # fmt: skip
def test_a_name_or_a_size_that_can_not_lie_in_a_version_is_refused(
    siblings: list[SiblingFile], words: str, publisher: Publisher, work_dir: Path
) -> None:
    assert words in unfit(siblings)
    with pytest.raises(CandidateDamaged, match=words):
        publish(publisher, work_dir, siblings)
    assert list(publisher.versions_dir.iterdir()) == []


def test_names_at_the_bounds_are_fit() -> None:
    assert unfit([]) == ""
    assert unfit(of("x" * 100, "a.b-c_D9", "-", "weights.pt.json", num_bytes=MAX_SIBLING_BYTES)) == ""
    assert unfit(of(*map(str, range(MAX_SIBLINGS)))) == ""


@pytest.mark.parametrize("spoil", [change, lengthen, Path.unlink])
def test_damage_of_any_file_is_found(spoil: Callable[[Path], None], publisher: Publisher, work_dir: Path) -> None:
    manifest = publish(publisher, work_dir, leave_siblings(work_dir, FILES))
    version_dir = publisher.versions_dir / manifest.version
    (version_dir / "linear-v2.bin").chmod(0o644)
    spoil(version_dir / "linear-v2.bin")
    assert damage(version_dir).startswith("linear-v2.bin")
    with pytest.raises(Exception, match=r"linear-v2\.bin"):
        open_live(publisher.models_dir, files=["linear-v2.bin"])
    assert open_live(publisher.models_dir, files=["window.json"]).files == {"window.json": FILES["window.json"]}


def test_a_link_in_the_place_of_a_file_is_damage(publisher: Publisher, work_dir: Path) -> None:
    manifest = publish(publisher, work_dir, leave_siblings(work_dir, FILES))
    path = publisher.versions_dir / manifest.version / "window.json"
    path.unlink()
    path.symlink_to(work_dir / "window.json")
    assert damage(path.parent) == "window.json is not a file"


def test_a_consumer_gets_the_files_that_it_asks_for_and_opens_no_other(
    publisher: Publisher, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(publisher, work_dir, leave_siblings(work_dir, FILES))
    opened, real = [], os.open

    def record(path: object, *args: object, **keywords: object) -> int:
        opened.append(str(path))
        return real(path, *args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", record)
    assert open_live(publisher.models_dir).files == {}
    assert opened[1:] == ["manifest.json", "weights.pt"]
    found = open_live(publisher.models_dir, files=("empty", "window.json", "of a later release"))
    assert found.files == {name: FILES[name] for name in ("window.json", "empty")}
    assert found.weights == b"weights"


@pytest.mark.parametrize("siblings", [3, [3], [{}], [{"name": "a"}]])
def test_a_manifest_whose_list_of_files_is_damaged_is_told_as_such(
    siblings: object, publisher: Publisher, work_dir: Path
) -> None:
    publish(publisher, work_dir, [])
    path = publisher.current / "manifest.json"
    record = msgspec.json.decode(path.read_bytes())
    path.chmod(0o644)
    path.write_bytes(msgspec.json.encode({**record, "siblings": siblings}))
    with pytest.raises(Damaged, match=r"manifest\.json can not be read"):
        open_live(publisher.models_dir, files=["a"])


def test_a_version_from_before_there_were_such_files_is_read_as_ever(publisher: Publisher, work_dir: Path) -> None:
    publish(publisher, work_dir, [])
    path = publisher.current / "manifest.json"
    record = msgspec.json.decode(path.read_bytes())
    path.chmod(0o644)
    path.write_bytes(msgspec.json.encode({key: record[key] for key in record if key != "siblings"}))
    assert open_live(publisher.models_dir, files=["a"]).files == {}
    assert damage(publisher.current.resolve()) == ""
