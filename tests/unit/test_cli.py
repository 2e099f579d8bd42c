"""The command line's surface: what is offered, in which words, and how errors become exit statuses."""

import re
from pathlib import Path

import pytest
from builders import NOW

from retraind import __version__, cli
from retraind.cli import main
from retraind.commands.train import new_job

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "help.txt"
VERBS = (
    "serve",
    "train",
    "inspect",
    "score",
    "check",
    "preflight",
    "status",
    "jobs",
    "requeue",
    "hold",
    "release",
    "models",
)


def frozen() -> dict[str, str]:
    """What the golden file shows for each verb below its prompt, as `$ retraind train --help`; "" is no verb."""
    _, *shown = re.split(r"^\$ retraind (\w*) ?--help\n", GOLDEN.read_text(), flags=re.MULTILINE)
    return dict(zip(shown[::2], shown[1::2], strict=True))


def help_of(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"] if verb else ["--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_the_help_is_the_frozen_one(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    # Python's versions fold lines differently; the words are ours.
    assert help_of(verb, capsys).split() == frozen()[verb].split()


def test_the_frozen_help_covers_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(frozen()) == ("", *VERBS)
    assert tuple(re.findall(r"^    (\w+)", help_of("", capsys), flags=re.MULTILINE)) == VERBS


def test_every_verb_has_a_line_in_the_list_and_more_in_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    listed = help_of("", capsys)
    for verb in VERBS:
        summary, details = help_of(verb, capsys).split("\n\n", 3)[1:3]
        assert summary.endswith(".")
        assert summary[1:-1] in " ".join(listed.split())
        assert len(details.split()) > 5, f"{verb}: {details}"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"retraind {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "VERB"),
        (["learn"], "invalid choice: 'learn'"),
        (["train"], "FILE"),
        (["train", "a.csv", "--device", "tpu"], "'tpu'"),
        (["jobs", "--limit", "many"], "'many'"),
        (["jobs", "--limit", "0"], "'0' is not a number from 1 on"),
        (["jobs", "--limit", "-1"], "'-1' is not a number from 1 on"),
        (["models", "--jsno"], "--jsno"),
    ],
)
def test_what_the_parser_refuses_ends_with_64_and_the_usage(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (64, "")
    assert shown.err.startswith("usage: retraind")
    assert said in shown.err.splitlines()[-1]


@pytest.mark.parametrize("verb", ["train", "inspect", "score"])
def test_a_missing_file_is_named_and_ends_with_64(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    missing = tmp_path / "a.csv"
    assert main([verb, str(missing), "--config", config]) == 64
    assert capsys.readouterr().err == f"retraind {verb}: not_found: {missing}: no such file\n"


@pytest.mark.parametrize(("option", "value"), [("epochs", "0"), ("batch-size", "1"), ("seed", "-1")])
def test_an_option_is_held_to_the_range_of_its_key(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    (tmp_path / "a.csv").touch()
    assert main(["train", str(tmp_path / "a.csv"), f"--{option}", value, "--config", config]) == 64
    assert option.replace("-", "_") in capsys.readouterr().err
    assert not (tmp_path / "models").exists()


def test_a_machines_fault_is_named_with_its_path_and_ends_with_69(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str
) -> None:
    (tmp_path / "spool").touch()
    assert main(["requeue", "--all-quarantined", "--config", config]) == 69
    assert capsys.readouterr().err == f"retraind requeue: {tmp_path}/spool/quarantine: Not a directory\n"


def test_the_usual_configuration_file_is_read_where_it_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tmp_path / "etc.yaml"
    monkeypatch.setattr(cli, "DEFAULT_CONFIG", usual)
    assert main(["models", "--json"]) == 0
    assert '"path": "/var/models/telemetry_autoencoder.pt"' in capsys.readouterr().out
    usual.write_text("models: {dir: published}\n")
    assert main(["models", "--json"]) == 0
    assert f'"path": "{tmp_path}/published/telemetry_autoencoder.pt"' in capsys.readouterr().out


def test_two_foreground_runs_of_one_second_are_two_jobs() -> None:
    """A publication is found again by its job: with one id, the second run would publish the first one's model."""
    first, second = (new_job([Path("a.csv"), Path("b.csv")], NOW) for _ in range(2))
    assert first.id != second.id
    assert first.name == "a.csv and 1 more"


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A configuration on directories below the test's own."""
    path = tmp_path / "retraind.yaml"
    path.write_text("spool: {dir: spool}\nmodels: {dir: models}\nstate: {dir: state}\n")
    return str(path)
