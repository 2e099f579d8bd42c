"""`retraind models show`: one version in text, from the facts of its page; `--json` is its manifest."""

import msgspec
import pytest
from builders import HOSTILE, JOB_ID, NOW, OTHER_ID, make_bare, make_manifest

from retraind.commands.models import models
from retraind.config import Config, ModelsConfig
from retraind.report import Candidate, Manifest
from retraind.supervisor.publish import Publisher

NAME = "telemetry_autoencoder"


def publish(publisher: Publisher, facts: Manifest, job_id: str) -> Manifest:
    weights = publisher.models_dir.parent / "weights.pt"
    weights.write_bytes(b"weights")
    shared = {name: getattr(facts, name) for name in Candidate.__struct_fields__ if hasattr(facts, name)}
    candidate = Candidate(**shared, tensors=[], expected=[])
    return publisher.publish(candidate, weights, job_id, NOW, gate=facts.gate)


def run(publisher: Publisher, action: str, version: str | None, *, as_json: bool = False) -> int:
    config = Config(models=ModelsConfig(dir=publisher.models_dir, name=NAME))
    return models(config, action, version, every=False, as_json=as_json)


def test_a_version_is_told_with_its_figures(publisher: Publisher, capsys: pytest.CaptureFixture[str]) -> None:
    first = publish(publisher, make_manifest(["cpu", "memory"]), JOB_ID)
    second = publish(publisher, make_manifest(["cpu", "load"]), OTHER_ID)
    assert run(publisher, "show", "2") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "+ Better than predicting each metric's mean: mean error 0.25 against 1",
        "- Worse than 8 principal components",
        f"version {second.version} (live)",
        f"page {publisher.versions_dir / second.version / 'report.html'}",
        f"replaces {first.version}",
        "9,023 7.5 cpu 62 % (z -8.3)",
        "cpu 0.5 load 0.25",
        "New metrics: load. No longer there: memory.",
        "wrong_tensors pass cpu",
        "host.disk warn cpu; make room",
        "dropped missing 3",
        "network 2 - 24 - 8 - 24 - 2",
    ):
        assert words in shown, words


def test_a_version_of_which_little_is_known_is_told_in_sentences(
    publisher: Publisher, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(publisher, make_bare(), JOB_ID)
    assert run(publisher, "show", "1") == 0
    shown = capsys.readouterr().out
    for words in (
        "? No version that was live before",
        "No single rows",
        "single metrics are not",
        "gate looked at is not",
    ):
        assert words in shown
    assert "Compared" not in shown


def test_a_version_before_that_is_gone_is_said_to_be(publisher: Publisher, capsys: pytest.CaptureFixture[str]) -> None:
    first = publish(publisher, make_bare(), JOB_ID)
    publish(publisher, make_bare(), OTHER_ID)
    (publisher.versions_dir / first.version).rename(publisher.models_dir.parent / "gone")
    assert run(publisher, "show", "2") == 0
    assert f"{first.version} is no longer there." in capsys.readouterr().out


def test_what_is_long_is_cut_and_the_rest_counted(publisher: Publisher, capsys: pytest.CaptureFixture[str]) -> None:
    publish(publisher, make_manifest([f"metric-{index}" for index in range(700)]), JOB_ID)
    assert run(publisher, "show", "1") == 0
    shown = capsys.readouterr().out
    assert "and 690 more" in shown
    assert len(shown.splitlines()) < 100


def test_names_from_data_do_nothing_to_a_terminal(publisher: Publisher, capsys: pytest.CaptureFixture[str]) -> None:
    publish(publisher, make_manifest([f"\x1b[31m[bold]{HOSTILE}\n\x07", "load"]), JOB_ID)
    assert run(publisher, "show", "1") == 0
    shown = capsys.readouterr().out
    assert "\\x1b[31m[bold]" in shown
    assert all(character == "\n" or character.isprintable() for character in shown)


def test_json_is_the_manifest(publisher: Publisher, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = publish(publisher, make_manifest(["cpu", "load"]), JOB_ID)
    assert run(publisher, "show", "1", as_json=True) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Manifest) == manifest


def test_a_page_that_was_changed_is_found(publisher: Publisher, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = publish(publisher, make_bare(), JOB_ID)
    page = publisher.versions_dir / manifest.version / "report.html"
    assert run(publisher, "verify", None) == 0
    page.chmod(0o644)
    page.write_bytes(page.read_bytes() + b"<script>1</script>")
    assert run(publisher, "verify", None) == 65
    assert "report.html has" in capsys.readouterr().out
