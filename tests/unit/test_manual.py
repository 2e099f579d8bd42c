"""The manual: what the code has stands in it, it is the same wherever it is made, and it renders without complaint."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Meta

from retraind import __version__, cli, config_file
from retraind.config import RESTART_KEYS, Config, get_key
from retraind.errors import RetraindError
from retraind.supervisor import wake

ROOT = Path(__file__).resolve().parents[2]
MAN = ROOT / "docs" / "man"
GENERATE = MAN / "generate.py"
SHIPPED = ROOT / "etc" / "retraind.yaml"
sys.path.insert(0, str(MAN))

import config_page
import generate
import roff

PAGES = ("retraind.8", "retraind.yaml.5")
EPOCH = "1796000000"


def make(directory: Path, **environment: str) -> dict[str, bytes]:
    """The pages as a build makes them: by a program of its own, in an environment of its own."""
    env = {"PATH": os.environ["PATH"], "SOURCE_DATE_EPOCH": EPOCH, **environment}
    subprocess.run([sys.executable, str(GENERATE), str(directory)], env=env, timeout=60, check=True, cwd="/")
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("man") / "new" / "directory"
    assert sorted(make(directory)) == sorted(PAGES)
    return directory


@pytest.fixture
def commands(made: Path) -> str:
    return plain(made / "retraind.8")


@pytest.fixture
def keys(made: Path) -> str:
    return plain(made / "retraind.yaml.5")


def plain(page: Path) -> str:
    """The page's source as a person would write it: no fonts, every escaped character as itself."""
    text = re.sub(r"\\f[BIRP]|\\&|\\\|", "", page.read_text(encoding="ascii"))
    for escaped, char in (("\\-", "-"), ("\\(aq", "'"), ("\\(ga", "`"), ("\\(dq", '"'), ("\\(ti", "~"), ("\\~", " ")):
        text = text.replace(escaped, char)
    return text


def section(page: str, name: str) -> str:
    return re.search(rf"^\.SH {name}\n(.*?)(?=^\.SH |\Z)", page, re.MULTILINE | re.DOTALL)[1]


def subparsers() -> dict:
    return next(action.choices for action in cli.build_parser()._actions if action.dest == "verb")


def flat(text: str) -> str:
    """In one line and without the marks of the sources."""
    return re.sub(r"\s+", " ", re.sub(r"[`<>]", "", text))


# What stands in the pages


@pytest.mark.parametrize("verb", list(subparsers()))
def test_every_verb_has_its_synopsis_and_says_what_it_does(commands: str, verb: str) -> None:
    synopsis = re.search(
        rf'^\.SY "retraind {verb}"\n(.*?)\.YS', section(commands, "SYNOPSIS"), re.MULTILINE | re.DOTALL
    )
    told = re.search(rf"^\.TP\nretraind {verb}\n(.*?)(?=^\.TP\nretraind |\Z)", section(commands, "COMMANDS"),
                     re.MULTILINE | re.DOTALL)  # fmt: skip
    parser = subparsers()[verb]
    words = re.sub(r"^\.\w+\n", "", told[1], flags=re.MULTILINE)
    assert flat(parser.description) in flat(words)
    for action in parser._actions:
        if action.dest != "help":
            name = action.option_strings[0] if action.option_strings else action.metavar or next(iter(action.choices))
            assert name in synopsis[1]
            # What several verbs take is explained once, among the options.
            assert flat(action.help)[1:] in flat(told[1] + section(commands, "OPTIONS"))
            assert all(choice in synopsis[1] for choice in action.choices or ())


def test_what_excludes_each_other_is_one_term_of_the_synopsis(commands: str) -> None:
    assert "\n{JOB|--all-quarantined}\n" in section(commands, "SYNOPSIS")
    assert "\n{-h|--help|--version}\n" in section(commands, "SYNOPSIS")


def test_an_option_of_several_verbs_is_explained_once_with_its_verbs(commands: str) -> None:
    options = section(commands, "OPTIONS")
    assert commands.count(".TP\n--json\n") == 1
    whose = re.search(r"\.TP\n--json\n.*\n(Every command takes it but [^.]*\.)", options)
    assert flat(whose[1]) == "Every command takes it but serve, score, requeue, hold and release."
    assert re.search(r"\.TP\n--config FILE\n(?:.*\n)+?Every command takes it\.", options)
    assert "\n.TP\n--version\n" in options


def families(base: type[RetraindError] = RetraindError) -> list[type[RetraindError]]:
    return [family for direct in base.__subclasses__() for family in (direct, *families(direct))]


def test_every_exit_status_is_told(commands: str) -> None:
    entries = re.findall(r"^\.TP\n(\d+)\n(.+)", section(commands, "EXIT STATUS"), re.MULTILINE)
    assert [int(status) for status, _ in entries] == list(cli.EXIT_STATUSES)
    assert {family.exit_status for family in families()} <= set(cli.EXIT_STATUSES)


@pytest.mark.parametrize("key", config_file.all_keys())
def test_every_key_is_told_with_its_default_and_when_a_change_counts(keys: str, key: str) -> None:
    value = get_key(Config(), key)
    default = (
        str(value).lower() if isinstance(value, bool) else {"None": "null", "()": "[]"}.get(str(value), str(value))
    )
    told = re.search(rf"^\.TP\n{re.escape(key)}\n(?:.+\n)+?Default: {re.escape(default)}\.\n"
                     r"Takes effect at a (\w+)\.\n\.IP\n(.+)", section(keys, "KEYS"), re.MULTILINE)  # fmt: skip
    assert told, key
    assert told[1] == ("RESTART" if key in RESTART_KEYS else "reload")
    assert not told[2].startswith("RESTART")


def test_the_words_of_the_shipped_file_are_those_of_the_page(keys: str) -> None:
    shipped = config_page.read_shipped(SHIPPED)
    for key, comment in shipped.comments.items():
        assert flat(comment.removeprefix("RESTART. ")) in flat(keys), key
    assert flat(shipped.head[1]) in flat(keys)


def test_every_signal_and_every_name_of_the_environment_is_told(commands: str) -> None:
    assert all(number.name in section(commands, "SIGNALS") for number in wake._SIGNALS)
    sources = "".join(path.read_text() for path in (ROOT / "daemon").rglob("*.py"))
    names = set(re.findall(r'os\.environ(?:\.get\(|\[)"(\w+)"', sources))
    assert names
    assert {name for name in names if name not in section(commands, "ENVIRONMENT")} == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_sections_that_a_reader_looks_for(made: Path, page: str) -> None:
    found = re.findall(r"^\.SH (.+)$", (made / page).read_text(), re.MULTILINE)
    wanted = {
        "retraind.8": "COMMANDS,OPTIONS,EXIT STATUS,SIGNALS,ENVIRONMENT,FILES",
        "retraind.yaml.5": "KEYS",
    }
    assert found == ["NAME", "SYNOPSIS", "DESCRIPTION", *wanted[page].split(","), "EXAMPLES", "SEE ALSO"]


def test_the_example_of_a_configuration_is_one(keys: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^\.EX\n(.*?)^\.EE", section(keys, "EXAMPLES"), re.MULTILINE | re.DOTALL)
    yaml = [block for block in blocks if "[Service]" not in block]
    assert len(yaml) == 2
    for block in yaml:
        path = tmp_path / "r.yaml"
        path.write_text(block)
        assert config_file.load(path) != config_file.load(None)


# A new key needs nothing in the generator


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (bool, "true or false"),
        (str, "text"),
        (Path, "path"),
        (Path | None, "path, or `null`"),
        (int | None, "whole number, or `null`"),
        (Literal["a", "b"], "one of `a`, `b`"),
        (Literal["a", "b"] | None, "one of `a`, `b`, or `null`"),
        (Annotated[int, Meta(ge=1)], "whole number, at least 1"),
        (Annotated[int, Meta(ge=1, le=9)], "whole number from 1 to 9"),
        (Annotated[float, Meta(gt=0, lt=0.5)], "number, above 0, below 0.5"),
        (Annotated[float, Meta(gt=0)] | None, "number, above 0, or `null`"),
        (Annotated[int, Meta(multiple_of=8)], "whole number, a multiple of 8"),
        (Annotated[str, Meta(min_length=1, max_length=9)], "text, at least 1 characters, at most 9 characters"),
        (Annotated[str, Meta(pattern="^[a-z]+$")], "text: as ^[a-z]+$"),
    ],
)
def test_what_a_key_may_be_is_told_by_its_type(kind: object, words: str) -> None:
    assert config_page.expected_words(kind) == words


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("device: auto\n", "", ": keys that only it or only config.py has: device"),
        ("device: auto\n", "device: auto\nnew: 1\n", ": keys that only it or only config.py has: new"),
        ("device: auto\n", "device auto\n", ":12: expected a comment or `key: value`, found 'device auto'"),
    ],
)
def test_a_shipped_file_that_does_not_fit_is_refused_with_its_place(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    path = tmp_path / "retraind.yaml"
    text = SHIPPED.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(config_page.SourceError) as caught:
        config_page.read_shipped(path)
    assert str(caught.value) == f"{path}{complaint}"


# How the pages are made


def test_the_pages_are_the_same_bytes_wherever_and_whenever_they_are_made(made: Path, tmp_path: Path) -> None:
    first = {name: (made / name).read_bytes() for name in PAGES}
    for number, elsewhere in enumerate(
        (
            {"TZ": "Pacific/Kiritimati", "LC_ALL": "C", "PYTHONHASHSEED": "1"},
            {"TZ": "America/Adak", "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "2", "PYTHONUTF8": "0", "COLUMNS": "40"},
        )
    ):
        assert make(tmp_path / str(number), **elsewhere) == first
    assert all(page.isascii() for page in first.values())


def test_the_date_is_the_builds_else_the_changelogs_and_never_todays(tmp_path: Path) -> None:
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## [0.2.0] - 2027-01-02\n\n## [0.1.0] - 2026-12-01\n")
    assert generate.written_on({"SOURCE_DATE_EPOCH": "86399"}, changelog) == "1970-01-01"
    assert generate.written_on({}, changelog) == "2027-01-02"
    changelog.write_text("# Changelog\n")
    with pytest.raises(generate.TemplateError, match=r"CHANGELOG\.md: no heading of the form"):
        generate.written_on({}, changelog)
    with pytest.raises(generate.TemplateError, match="'yesterday': expected seconds since 1970"):
        generate.written_on({"SOURCE_DATE_EPOCH": "yesterday"}, changelog)


def test_the_head_names_the_page_the_date_and_the_version(commands: str, keys: str) -> None:
    head = f'"2026-11-30" "retraind {__version__}"'
    assert f'\n.TH RETRAIND 8 {head} "System Administration"\n' in commands
    assert f'\n.TH RETRAIND.YAML 5 {head} "File Formats"\n' in keys


def test_a_word_that_a_template_makes_up_is_named_with_its_line(tmp_path: Path) -> None:
    template = tmp_path / "page.in"
    template.write_text("one\n@KNOWN@ @default:unknown.key@\n")
    with pytest.raises(generate.TemplateError, match=r"page\.in:2: nothing is known as @default:unknown\.key@"):
        generate.fill(template, {"KNOWN": "1"})


def test_a_directory_that_can_not_be_made_ends_with_1_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, str(GENERATE), str(tmp_path / "file" / "man")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("generate.py: ")
    assert str(tmp_path / "file") in done.stderr


def test_a_build_needs_none_of_the_workers_libraries(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); import generate; del sys.argv[2]; assert generate.main() == 0\n"
    )
    command = [sys.executable, "-c", f"{code}print(*sys.modules)", str(tmp_path), str(MAN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(PAGES)
    heavy = {"torch", "numpy", "pandas", "rich", "watchdog", "prometheus_client", "sdnotify"}
    assert heavy.isdisjoint(name.partition(".")[0] for name in done.stdout.split())


# How the pages look


def tool(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")


def run(*command: str | Path, **environment: str) -> tuple[str, str]:
    """What a tool prints, and what it complains of."""
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "MANWIDTH": "80", "MAN_KEEP_FORMATTING": "", **environment}
    done = subprocess.run([str(word) for word in command], capture_output=True, timeout=60, check=False, env=env)
    return done.stdout.decode(), done.stderr.decode()


def shown(made: Path, page: str) -> str:
    """As a terminal shows it, without bold and underlining."""
    text, complaints = run("groff", "-man", "-ww", "-Tutf8", "-P-c", "-rLL=78n", made / page)
    assert complaints == ""
    return re.sub(r".\x08", "", text)


@tool("groff")
@pytest.mark.parametrize("page", PAGES)
def test_groff_complains_of_nothing_and_what_it_shows_can_be_copied(made: Path, page: str) -> None:
    lines = shown(made, page).splitlines()
    assert len(lines) > 100
    assert [line for line in lines if not line.isascii() or len(line) > 80] == []


@tool("groff")
def test_names_are_shown_whole(made: Path) -> None:
    page = shown(made, "retraind.8")
    for name in ("--batch-size N", "--all-quarantined", "intake.quiet_seconds", "systemctl reload retraind"):
        assert name in page
    page = shown(made, "retraind.yaml.5")
    assert all(key in page for key in config_file.all_keys())


@tool("groff")
@pytest.mark.parametrize(
    "text", [".not a macro", "'nor this", r"back\slash \fB \n", "a-b --c - 'quoted' \"twice\" `thrice`", "^ ~ #$%@|<>"]
)
def test_text_is_shown_as_it_is(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page"
    for set_by in (roff.escape, roff.bold, roff.italic):
        page.write_text(f".TH A 1\n.SH B\n{roff._guarded(set_by(text))}\n")
        assert text in shown(tmp_path, "page")
    page.write_text(".TH A 1\n.SH B\n" + roff.example([text]) + "\n" + roff.entry(roff.escape(text), "") + "\n")
    assert shown(tmp_path, "page").count(text) == 2


def test_marks_of_the_sources_become_fonts() -> None:
    words = "See `check --config FILE`, --json. In spool.dir/incoming and /etc/x.yaml, <dir>/<name>.pt, e.g. a.b."
    assert roff.prose(words, {"spool.dir"}).splitlines() == [
        r"See \fBcheck \-\-config \fP\fIFILE\fP, \fB\-\-json\fP.",
        r"In \fBspool.dir\fP/incoming and \fI/etc/x.yaml\fP, \fIdir\fP/\fIname\fP.pt,",
        "e.g. a.b.",
    ]


@tool("man")
@pytest.mark.parametrize("page", PAGES)
def test_man_shows_a_page_without_a_warning(made: Path, page: str) -> None:
    text, complaints = run("man", "-l", "--warnings", made / page)
    assert complaints == ""
    assert "SEE ALSO" in re.sub(r".\x08", "", text)


@tool("lexgrog")
@pytest.mark.parametrize("page", PAGES)
def test_the_index_of_pages_knows_what_it_is(made: Path, page: str) -> None:
    text, _ = run("lexgrog", made / page)
    assert re.fullmatch(rf'.*: "{re.escape(page[:-2])} - \w.+"\n', text)


@tool("mandoc")
@pytest.mark.parametrize("page", PAGES)
def test_mandoc_finds_nothing(made: Path, page: str) -> None:
    assert run("mandoc", "-T", "lint", made / page) == ("", "")
