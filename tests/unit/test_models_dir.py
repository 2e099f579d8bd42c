"""The models directory over time: rollback, pins, retention, signatures, planted links, and what a crash leaves."""

import json
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from builders import LATER, NOW, make_candidate
from disk_faults import CODES, DiskFault, any_change, is_dir_fsync

from retraind import fsio
from retraind.errors import PublishError, UsageError
from retraind.report import Manifest
from retraind.supervisor import history as past
from retraind.supervisor.history import History, Switch
from retraind.supervisor.publish import Publisher
from retraind.supervisor.versions import damage, read_history, read_manifest, version_dirs

NAME = "telemetry_autoencoder"


def publish(publisher: Publisher, number: int, sign: tuple[str, ...] = (), *, live: bool = True) -> Manifest:
    """The job of that number, whose weights are its number."""
    weights = b"%d" % number
    path = publisher.models_dir.parent / f"work-{number}.pt"
    path.write_bytes(weights)
    return publisher.publish(make_candidate(weights), path, f"job-{number}", NOW, sign, live=live)


def wait(publisher: Publisher, number: int) -> str:
    """A version that is made and not live."""
    return publish(publisher, number, live=False).version


def publish_all(publisher: Publisher, *numbers: int) -> list[str]:
    return [publish(publisher, number).version for number in numbers]


def names(publisher: Publisher) -> list[str]:
    return [path.name for path in version_dirs(publisher.home)]


def hidden(publisher: Publisher) -> list[str]:
    return [path.name for path in publisher.versions_dir.iterdir() if path.name.startswith(".")]


def live(publisher: Publisher) -> bytes:
    """What a consumer reads, with the manifest of the same version beside it."""
    weights = publisher.link.read_bytes()
    manifest = read_manifest(publisher.current)
    assert manifest is not None
    assert (manifest.version, manifest.weights_sha256) == (publisher.live_version(), fsio.sha256_of_bytes(weights))
    return weights


def test_a_rollback_makes_the_version_live_that_was_live_before_and_a_second_one_takes_it_back(
    publisher: Publisher,
) -> None:
    one, two, three = publish_all(publisher, 1, 2, 3)
    assert publisher.rollback("", LATER) == (three, two)
    assert live(publisher) == b"2"
    assert publisher.rollback("", LATER) == (two, three)
    assert publisher.rollback(one, LATER) == (three, one)
    assert live(publisher) == b"1"
    history = read_history(publisher.home)
    assert [(switch.version, switch.by) for switch in history.switches][2:] == [
        (three, "publication"), (two, "rollback"), (three, "rollback"), (one, "rollback"),
    ]  # fmt: skip


def test_the_publication_after_a_rollback_has_a_new_higher_number(publisher: Publisher) -> None:
    one, two = publish_all(publisher, 1, 2)
    publisher.rollback(one, LATER)
    assert publish(publisher, 3).sequence == 3
    assert live(publisher) == b"3"
    assert publisher.rollback("", LATER)[1] == one, "what was live before, not the number below"
    assert names(publisher)[1] == two


def test_a_job_that_is_published_again_does_not_undo_a_rollback(publisher: Publisher) -> None:
    """The service died between the commit and the record of it; meanwhile an operator went back."""
    one, two = publish_all(publisher, 1, 2)
    publisher.rollback(one, LATER)
    assert publish(publisher, 2).version == two
    assert publisher.live_version() == one
    assert names(publisher) == [one, two]


def test_a_stale_job_does_not_publish_over_a_newer_one(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version was built, the commit failed, and another process published before it was tried again."""
    publish(publisher, 1)
    with monkeypatch.context() as patch:
        DiskFault(CODES["EIO"], lambda name, args: name == "replace" and "current" in str(args[1])).install(patch)
        with pytest.raises(PublishError):
            publish(publisher, 2)
    assert (live(publisher), len(names(publisher))) == (b"1", 2)
    newer = publish(publisher, 3)
    stale = publish(publisher, 2)
    assert (stale.sequence, newer.sequence) == (2, 3)
    assert live(publisher) == b"3"


def test_a_version_whose_commit_failed_is_committed_by_the_next_try(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(publisher, 1)
    with monkeypatch.context() as patch:
        DiskFault(CODES["EIO"], lambda name, args: name == "replace" and "current" in str(args[1])).install(patch)
        with pytest.raises(PublishError):
            publish(publisher, 2)
    assert publish(publisher, 2).sequence == 2
    assert (live(publisher), len(names(publisher))) == (b"2", 2)


def test_a_number_is_not_used_again_although_its_version_was_removed_by_hand(publisher: Publisher) -> None:
    one, two = publish_all(publisher, 1, 2)
    publisher.rollback(one, LATER)
    (publisher.versions_dir / two).rename(publisher.models_dir.parent / two)
    assert publish(publisher, 3).sequence == 3


@pytest.mark.parametrize("ask", ["000009-aaaaaaaaaaaa", "", "live", "../../etc"])
def test_a_rollback_to_what_is_not_there_or_live_changes_nothing(publisher: Publisher, ask: str) -> None:
    only = publish(publisher, 1).version
    before = (publisher.home / "history.json").read_bytes()
    with pytest.raises(UsageError):
        publisher.rollback(only if ask == "live" else ask, LATER)
    assert publisher.live_version() == only
    assert (publisher.home / "history.json").read_bytes() == before


def test_a_damaged_version_does_not_become_live(publisher: Publisher) -> None:
    one, two = publish_all(publisher, 1, 2)
    weights = publisher.versions_dir / one / "weights.pt"
    weights.chmod(0o644)
    weights.write_bytes(b"x")
    with pytest.raises(UsageError, match="is damaged: weights.pt has sha256"):
        publisher.rollback("", LATER)
    assert publisher.live_version() == two


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
def test_a_fault_at_any_step_of_a_rollback_leaves_a_whole_version_live(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nth in range(1, 50):
        publisher = Publisher(tmp_path / str(nth) / "models", NAME)
        publisher.open()
        one, _ = publish_all(publisher, 1, 2)
        disk = DiskFault(code, any_change, nth)
        with monkeypatch.context() as patch:
            disk.install(patch)
            try:
                publisher.rollback("", LATER)
            except PublishError as error:
                assert error.__cause__ is disk.error
        if not disk.failed_at:
            break
        assert live(publisher) in (b"1", b"2")
        if publisher.live_version() != one:
            publisher.rollback(one, LATER)
        assert live(publisher) == b"1"
        assert publish(publisher, 3).sequence == 3
        assert live(publisher) == b"3", disk.failed_at
    assert nth > 5


def test_a_directory_fsync_that_fails_after_the_commit_is_told_and_not_rolled_back(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(publisher, 1)
    is_home = lambda name, args: is_dir_fsync(name, args) and os.path.samestat(os.fstat(args[0]), publisher.home.stat())  # noqa: E731
    with monkeypatch.context() as patch:
        DiskFault(CODES["EIO"], is_home, nth=2).install(patch)  # the first is the history's
        with pytest.raises(PublishError):
            publish(publisher, 2)
    assert live(publisher) == b"2"
    assert "is not sure yet to survive a power cut" in caplog.text
    inode = publisher.current.lstat().st_ino
    assert publish(publisher, 2).sequence == 2
    assert publisher.current.lstat().st_ino != inode, "the link was made anew, not only synced once more"


def test_retention_keeps_the_newest_the_live_one_the_one_before_and_the_pinned(publisher: Publisher) -> None:
    versions = publish_all(publisher, *range(1, 11))
    publisher.pin(versions[1], NOW, on=True)
    publisher.rollback(versions[3], LATER)
    publisher.rollback(versions[2], LATER)
    removed = publisher.prune(2, LATER)
    assert removed == [versions[0], *versions[4:8]]
    assert names(publisher) == [*versions[1:4], *versions[8:]]
    assert hidden(publisher) == []
    assert live(publisher) == b"3"
    publisher.pin(versions[1], NOW, on=False)
    assert publisher.prune(2, LATER) == [versions[1]]


def test_without_a_limit_all_versions_stay(publisher: Publisher) -> None:
    versions = publish_all(publisher, 1, 2, 3)
    assert publisher.prune(None, LATER) == []
    assert names(publisher) == versions


def test_what_is_no_version_is_never_removed(publisher: Publisher) -> None:
    for name in ("notes", "x-1", "000001-by-hand"):
        (publisher.versions_dir / name).mkdir()
    publish_all(publisher, 1, 2, 3, 4)
    publisher.prune(1, LATER)
    assert {"notes", "x-1", "000001-by-hand"} <= {path.name for path in publisher.versions_dir.iterdir()}


def test_a_crash_in_the_middle_of_a_removal_leaves_hidden_names_that_the_next_publication_sweeps(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_all(publisher, 1, 2, 3, 4)
    with monkeypatch.context() as patch:
        DiskFault(CODES["EIO"], is_dir_fsync).install(patch)
        with pytest.raises(PublishError):
            publisher.prune(1, LATER)
    assert len(hidden(publisher)) == 2
    assert len(names(publisher)) == 2
    publish(publisher, 5)
    assert hidden(publisher) == []


def test_a_version_is_hidden_for_good_before_its_first_file_goes(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not bring back a name that has lost its weights."""
    publish_all(publisher, 1, 2, 3)
    order: list[str] = []
    for name in ("fsync", "rename", "unlink"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, _n=name, _f=real, **kw: (order.append(_n), _f(*args, **kw))[1])
    publisher.prune(1, LATER)
    assert [step for step in order if step != "unlink"] == ["rename", "fsync"]
    assert order.index("fsync") < order.index("unlink")


def test_pins_are_durable_and_readable_by_all(publisher: Publisher) -> None:
    one, _ = publish_all(publisher, 1, 2)
    assert publisher.pin(one, NOW, on=True)
    assert not publisher.pin(one, NOW, on=True)
    path = publisher.home / "history.json"
    assert json.loads(path.read_text())["pinned"] == [one]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    with pytest.raises(UsageError, match="no version 000009-aaaaaaaaaaaa"):
        publisher.pin("000009-aaaaaaaaaaaa", NOW, on=True)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"pinned": 3}'])
def test_a_damaged_history_is_put_aside_and_nothing_is_removed(publisher: Publisher, text: bytes) -> None:
    versions = publish_all(publisher, 1, 2, 3)
    path = publisher.home / "history.json"
    path.write_bytes(text)
    newer = publish(publisher, 4)
    assert publisher.live_version() == newer.version
    assert publisher.prune(1, LATER) == []
    assert names(publisher) == [*versions, newer.version]
    assert path.with_name("history.json.bad").read_bytes() == text


def test_a_directory_from_before_the_history_goes_on(publisher: Publisher) -> None:
    one, two = publish_all(publisher, 1, 2)
    (publisher.home / "history.json").unlink()
    assert publish(publisher, 3).sequence == 3
    assert publisher.rollback("", LATER)[1] == two
    assert names(publisher)[0] == one


def test_a_link_that_was_changed_by_hand_is_believed(publisher: Publisher) -> None:
    one, _, three = publish_all(publisher, 1, 2, 3)
    fsio.replace_link(publisher.current, f"versions/{one}")
    assert publish(publisher, 4).sequence == 4
    assert publisher.rollback("", LATER)[1] == one
    assert three in names(publisher)


PLACES = ("home", "versions_dir", "current", "lock", "history", "version")


@pytest.mark.parametrize("place", PLACES)
def test_a_planted_link_is_refused_and_followed_nowhere(place: str, publisher: Publisher, tmp_path: Path) -> None:
    version = publish(publisher, 1).version
    victim = tmp_path / "victim"
    path = {
        "lock": publisher.home / ".lock", "history": publisher.home / "history.json",
        "version": publisher.versions_dir / version,
    }.get(place) or getattr(publisher, place)  # fmt: skip
    os.rename(path, victim) if place != "current" else victim.mkdir()
    if place == "current":
        path.unlink()
    path.symlink_to(victim)
    before = sorted((str(one), one.lstat().st_mtime_ns) for one in (victim, *victim.rglob("*")))
    for action in (
        publisher.open, lambda: publish(publisher, 2), lambda: publisher.prune(1, LATER),
        lambda: publisher.rollback(version, LATER), lambda: publisher.pin(version, NOW, on=True),
    ):  # fmt: skip
        if place == "history" and action == publisher.open:
            continue  # it is not read there
        with pytest.raises(PublishError, match="move it away") as caught:
            action()
        assert caught.value.code == "path_taken", place
    assert path.is_symlink()
    assert sorted((str(one), one.lstat().st_mtime_ns) for one in (victim, *victim.rglob("*"))) == before


def test_nothing_is_made_behind_a_planted_link(tmp_path: Path) -> None:
    """At the first start, in the place of the model's directory: what it leads to stays empty."""
    publisher = Publisher(tmp_path / "models", NAME)
    publisher.models_dir.mkdir()
    victim = tmp_path / "victim"
    victim.mkdir()
    publisher.home.symlink_to(victim)
    with pytest.raises(PublishError, match="is a link to"):
        publisher.open()
    assert list(victim.iterdir()) == []


def program(tmp_path: Path, body: str) -> tuple[str, ...]:
    path = tmp_path / "program.py"
    path.write_text(body)
    return (sys.executable, "-S", "-E", str(path), "--key", "a")


def test_a_signature_lies_beside_the_manifest_before_the_commit(publisher: Publisher, tmp_path: Path) -> None:
    sign = program(tmp_path, "import hashlib, sys; print(hashlib.sha256(open(sys.argv[-1], 'rb').read()).hexdigest())")
    version_dir = publisher.versions_dir / publish(publisher, 1, sign).version
    signature = version_dir / "manifest.json.sig"
    assert signature.read_text().strip() == fsio.sha256_of(version_dir / "manifest.json")
    assert stat.S_IMODE(signature.stat().st_mode) == 0o444
    assert damage(version_dir) == ""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("print('half'); raise SystemExit(1)", "exit status 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9"),
        ("", "printed no signature"),
        ("import time; print('x', flush=True); time.sleep(1000)", "no answer within"),
        ("import os\nif os.fork(): os._exit(0)\nimport time; time.sleep(1000)", "no answer within"),
        ("import sys; sys.stdout.write('x' * 10**6)", "printed more than"),
        (None, "No such file"),
    ],
)
def test_nothing_unsigned_is_published(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None, said: str
) -> None:
    if "within" in said:
        monkeypatch.setattr("retraind.supervisor.sign._SECONDS", 0.5)
    publish(publisher, 1)
    sign = ("/nowhere/sign",) if body is None else program(tmp_path, body)
    with pytest.raises(PublishError, match=said) as caught:
        publish(publisher, 2, sign)
    assert caught.value.code == "sign_failed"
    assert (live(publisher), len(names(publisher)), hidden(publisher)) == (b"1", 1, [])
    assert publish(publisher, 2, program(tmp_path, "print('ok')")).sequence == 2


def test_what_was_built_unsigned_is_not_committed_once_signatures_are_asked_for(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(publisher, 1)
    with monkeypatch.context() as patch:
        DiskFault(CODES["EIO"], lambda name, args: name == "replace" and "current" in str(args[1])).install(patch)
        with pytest.raises(PublishError):
            publish(publisher, 2)
    sign = program(tmp_path, "print('signed')")
    assert (publisher.versions_dir / publish(publisher, 2, sign).version / "manifest.json.sig").exists()
    with pytest.raises(PublishError, match="has no signature"):
        publisher.rollback("", LATER, sign)
    assert live(publisher) == b"2"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_roots_commands_make_belongs_to_the_owner_of_the_directory() -> None:
    with tempfile.TemporaryDirectory(prefix="retraind-test-") as root:  # pytest's own are closed to other users
        os.chmod(root, 0o755)
        check_owners(Path(root) / "models")


def check_owners(models: Path) -> None:
    models.mkdir()
    os.chown(models, 65534, 65534)
    publisher = Publisher(models, NAME)
    publisher.open()
    one, two = publish_all(publisher, 1, 2)
    publisher.pin(one, NOW, on=True)
    publisher.rollback(one, LATER)
    assert publisher.live_version() == one
    owners = {str(path): (path.lstat().st_uid, path.lstat().st_gid) for path in models.rglob("*")}
    assert set(owners.values()) == {(65534, 65534)}, owners
    assert (os.geteuid(), os.getegid()) == (0, 0)
    assert two in names(publisher)


def test_switches_are_forgotten_after_a_while_and_the_numbers_are_not() -> None:
    history = History()
    for number in range(1, 300):
        history = past.switched(history, f"{number:06d}-aaaaaaaaaaaa", "publication", NOW)
    assert len(history.switches) == 100
    assert (history.last_sequence, past.newest(history)) == (299, 299)
    assert msgspec.json.decode(msgspec.json.encode(history), type=History) == history


def test_a_switch_that_was_written_down_and_not_made_does_not_count() -> None:
    one, two = (Switch(version=f"00000{number}-aaaaaaaaaaaa", at=NOW, by="publication") for number in (1, 2))
    history = History(switches=[one, two], last_sequence=2)
    assert past.settled(history, one.version, LATER).switches == [one]
    assert past.settled(history, two.version, LATER) == history
    assert past.settled(History(switches=[one]), "", LATER).switches == []
    assert past.newest(past.settled(history, one.version, LATER)) == 1


def test_what_is_not_to_be_live_waits_until_it_is_promoted(publisher: Publisher) -> None:
    (one,) = publish_all(publisher, 1)
    two = wait(publisher, 2)
    assert wait(publisher, 2) == two, "published again after a crash: nothing changes"
    assert live(publisher) == b"1"
    assert past.waiting(read_history(publisher.home), [one, two]) == [two]
    assert publisher.promote(two, LATER) == (one, two)
    assert live(publisher) == b"2"
    assert read_history(publisher.home).switches[-1].by == "promotion"
    assert past.waiting(read_history(publisher.home), [one, two]) == []
    with pytest.raises(UsageError, match="live already"):
        publisher.promote(two, LATER)
    assert publisher.rollback("", LATER) == (two, one)


def test_the_number_of_a_version_that_never_was_live_is_not_given_again(publisher: Publisher) -> None:
    publish(publisher, 1)
    two = wait(publisher, 2)
    shutil.rmtree(publisher.versions_dir / two)
    assert publish(publisher, 3).sequence == 3


def test_the_first_version_may_wait_and_nothing_is_live_until_then(publisher: Publisher) -> None:
    one = wait(publisher, 1)
    assert publisher.live_version() == ""
    assert not os.path.lexists(publisher.link)
    publisher.check()
    assert publisher.promote(one, LATER) == ("", one)
    assert live(publisher) == b"1"


def test_retention_bounds_what_waits_and_keeps_what_is_live(publisher: Publisher) -> None:
    (one,) = publish_all(publisher, 1)
    waits = [wait(publisher, number) for number in (2, 3, 4)]
    assert publisher.prune(2, LATER) == waits[:1]
    assert live(publisher) == b"1"
    assert publisher.promote(waits[1], LATER) == (one, waits[1])
