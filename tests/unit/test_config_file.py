"""The configuration file: what is shipped, and every mistake that an operator can make, in the words that it gets."""

import re
from pathlib import Path

import msgspec
import pytest

from retraind import config_file
from retraind.config import RESTART_KEYS, Config, TrainingConfig, get_key, settings_fingerprint
from retraind.errors import ConfigError

SHIPPED = Path(__file__).resolve().parents[2] / "etc" / "retraind.yaml"
NO_ALIASES = "aliases, anchors and tags are not supported: write the value out"
NAME_FORM = "does not have the form that is expected (letters, digits, `_`, `.` and `-`)"
LISTEN_FORM = "does not have the form that is expected (host:port or [address]:port)"


@pytest.fixture
def write(tmp_path: Path):
    def write(content: str | bytes) -> Path:
        path = tmp_path / "r.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def complaints(path: Path) -> list[str]:
    """The lines of the error, without the directory of the file."""
    with pytest.raises(ConfigError) as caught:
        config_file.load(path)
    assert caught.value.exit_status == 78
    return caught.value.message.replace(f"{path.parent}/", "").split("\n")


def test_the_shipped_file_equals_the_defaults() -> None:
    assert config_file.load(SHIPPED) == config_file.load(None)


def test_the_shipped_file_gives_every_key_and_a_comment_above_it() -> None:
    lines = SHIPPED.read_text().split("\n")
    section, found = "", []
    for number, line in enumerate(lines):
        if match := re.fullmatch(r"( *)([a-z_]+):( .+)?", line):
            section = match[2] if not match[1] else section
            if match[3]:
                found.append(f"{section}.{match[2]}" if match[1] else match[2])
                assert lines[number - 1].lstrip().startswith("#"), found[-1]
    assert found == config_file.all_keys()


def test_the_shipped_file_marks_the_keys_that_need_a_restart() -> None:
    text = SHIPPED.read_text()
    blocks = {key: _comment_above(text, key) for key in config_file.all_keys()}
    assert {key for key, comment in blocks.items() if "RESTART." in comment} == set(RESTART_KEYS)


def _comment_above(text: str, key: str) -> str:
    section, _, name = key.rpartition(".")
    body = text if not section else re.search(rf"^{section}:\n((?:[ ].*\n|\n)+)", text, re.MULTILINE)[1]
    return re.search(rf"((?:^ *#.*\n)*)^ *{name}:", body, re.MULTILINE)[1]


@pytest.mark.parametrize("content", ["", "\n", "# a comment\n", "---\n", "spool:\ntraining:\n", "\ufeff", "{}"])
def test_an_empty_file_is_the_defaults(write, content: str) -> None:
    assert config_file.load(write(content)) == config_file.load(None)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("intake:\n  quiet_second: 1\n", "2: intake.quiet_second: unknown key (did you mean intake.quiet_seconds?)"),
        ("trainig:\n  epochs: 1\n", "1: trainig: unknown key (did you mean training?)"),
        ("quiet_seconds: 1\n", "1: quiet_seconds: unknown key (did you mean intake.quiet_seconds?)"),
        ("log:\n  epochs: 1\n", "2: log.epochs: unknown key (did you mean training.epochs?)"),
        ("log:\n  epoch: 1\n", "2: log.epoch: unknown key (did you mean training.epochs?)"),
        ("dir: /a\n", "1: dir: unknown key (did you mean spool.dir or models.dir or state.dir?)"),
        ("zzz: 1\n", "1: zzz: unknown key"),
        ("1: 2\n", "1: 1: unknown key"),
        ("<<: {}\n", "1: <<: unknown key"),
        ("spool:\n  [dir]: /a\n", "2: spool: a key must be one word"),
        ("device: cpu\nlog:\n  level: info\ndevice: cpu\n", "4: device: given twice, first in line 1"),
        ("log:\n  level: info\n\n  level: info\n", "4: log.level: given twice, first in line 2"),
        ("log:\n  level: info\nlog:\n  level: debug\n", "3: log: given twice, first in line 1"),
        ("training:\n  epochs: five\n", "2: training.epochs: must be a whole number or auto, not 'five'"),
        ("training:\n  epochs: 5.0\n", "2: training.epochs: must be a whole number or auto, not '5.0'"),
        ("training:\n  epochs: 1_000\n", "2: training.epochs: must be a whole number or auto, not '1_000'"),
        ("training:\n  epochs: yes\n", "2: training.epochs: must be a whole number or auto, not 'yes'"),
        ("preflight:\n  strict: yes\n", "2: preflight.strict: must be true or false, not 'yes'"),
        ("training:\n  epochs: ''\n", "2: training.epochs: must be a whole number or auto, not ''"),
        ("training:\n  learning_rate: fast\n", "2: training.learning_rate: must be a number, not 'fast'"),
        ("intake:\n  quiet_seconds: .nan\n", "2: intake.quiet_seconds: must be a number, not '.nan'"),
        ("gate:\n  max_heldout_loss: .inf\n", "2: gate.max_heldout_loss: must be a number, not '.inf'"),
        ("gate:\n  max_heldout_loss: 1e999\n", "2: gate.max_heldout_loss: is too large: 1e999"),
        ("training:\n  epochs: 0\n", "2: training.epochs: must be at least 1, not 0"),
        ("training:\n  epochs: 100001\n", "2: training.epochs: must be at most 100000, not 100001"),
        ("training:\n  checkpoint_seconds: 0\n", "2: training.checkpoint_seconds: must be above 0, not 0"),
        ("training:\n  holdout_share: 0.51\n", "2: training.holdout_share: must be at most 0.5, not 0.51"),
        ("training:\n  learning_rate: 0\n", "2: training.learning_rate: must be above 0, not 0"),
        ("training:\n  learning_rate: -1e-3\n", "2: training.learning_rate: must be above 0, not -1e-3"),
        ("training:\n  seed: -1\n", "2: training.seed: must be at least 0, not -1"),
        (
            "training:\n  seed: 9223372036854775808\n",
            "2: training.seed: must be at most 9223372036854775807, not 9223372036854775808",
        ),
        (
            "data:\n  max_bytes: 9999999999999999999\n",
            "2: data.max_bytes: must be at most 9223372036854775807, not 9999999999999999999",
        ),
        (f"data:\n  max_bytes: {'9' * 5000}\n", "2: data.max_bytes: must be a whole number of at most 19 digits"),
        ("training:\n  warm_start: 1\n", "2: training.warm_start: must be true or false, not '1'"),
        ("device: gpu\n", "1: device: must be one of auto, cuda, cpu, not 'gpu'"),
        ("log:\n  level: no\n", "2: log.level: must be one of debug, info, warning, error, not 'no'"),
        ("models:\n  name: ../x\n", f"2: models.name: '../x' {NAME_FORM}"),
        ("models:\n  name: ''\n", "2: models.name: must not be empty"),
        ("spool:\n  dir: ''\n", "2: spool.dir: must not be empty"),
        ('spool:\n  dir: "/a\\0b"\n', "2: spool.dir: must not hold control characters: '/a\\x00b'"),
        ('models:\n  name: "x\\n"\n', "2: models.name: must not hold control characters: 'x\\n'"),
        ("- spool\n- models\n", "1: expected keys with values below it"),
        ("text\n", "1: expected keys with values below it"),
        ("spool: /a\n", "1: spool: expected keys with values below it"),
        ("spool: [/a]\n", "1: spool: expected keys with values below it"),
        ("spool:\n  dir: [/a, /b]\n", "2: spool.dir: expected one value, not a list"),
        ("spool:\n  dir:\n    - /a\n", "3: spool.dir: expected one value, not a list"),
        ("spool:\n  dir: {a: 1}\n", "2: spool.dir: expected one value, not keys below it"),
        ("spool:\n  dir:\n", "2: spool.dir: has no value"),
        ("spool:\n  dir: ~\n", "2: spool.dir: has no value"),
        ("training:\n  epochs: null\n", "2: training.epochs: has no value"),
        ("device: null\n", "1: device: has no value"),
        ("log:\n  level: &l info\n", f"2: {NO_ALIASES}"),
        ("log:\n  level: !!str info\n", f"2: {NO_ALIASES}"),
        ("spool: !!python/object:os.system {}\n", f"1: {NO_ALIASES}"),
        ("device: cpu\nlog: {level: 'info}\n",
         "3: not valid YAML: while scanning a quoted scalar, found unexpected end of stream"),
        ("device: cpu\nlog:\n\tlevel: info\n",
         "3: not valid YAML: while scanning for the next token, found character '\\t' that cannot start any token"),
        ("device: cpu\n---\ndevice: cpu\n",
         "2: not valid YAML: expected a single document in the stream, but found another document"),
        ("device: cpu\nlog: \x01\n", "2: not valid YAML: the character '\\x01' is not allowed"),
        ("[" * 3000 + "]" * 3000, "1: not valid YAML: nested too deeply"),
        (b"device: cpu\n# caf\xe9\n", "2: not UTF-8: byte 0xe9"),
        ("metrics:\n  listen: 10935\n", f"2: metrics.listen: '10935' {LISTEN_FORM}"),
        ("metrics:\n  listen: '::1:10935'\n", f"2: metrics.listen: '::1:10935' {LISTEN_FORM}"),
        ("metrics:\n  listen: 127.0.0.1:http\n", f"2: metrics.listen: '127.0.0.1:http' {LISTEN_FORM}"),
        ("metrics:\n  listen: '[::1]:65536'\n", "2: metrics.listen: port 65536 is above 65535"),
        ("metrics:\n  listen: a..b:80\n", "2: metrics.listen: 'a..b' is no host name and no address"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_line_and_a_way_out(write, content: str | bytes, complaint: str) -> None:
    assert complaints(write(content)) == [f"r.yaml:{complaint}"]


@pytest.mark.parametrize(
    ("spool", "models", "complaint"),
    [
        ("/a/b", "/a", "4: models.dir: /a and spool.dir /a/b must not lie within each other"),
        ("/a", "/a/b", "4: models.dir: /a/b and spool.dir /a must not lie within each other"),
        ("/a", "/a", "4: models.dir: /a and spool.dir /a must not lie within each other"),
        ("/a/b", "/a/c/../b/d", "4: models.dir: /a/b/d and spool.dir /a/b must not lie within each other"),
    ],
)
def test_directories_within_each_other_are_refused(write, spool: str, models: str, complaint: str) -> None:
    path = write(f"spool:\n  dir: {spool}\nmodels:\n  dir: {models}\n")
    assert complaints(path) == [f"r.yaml:{complaint}"]


def test_a_directory_around_a_default_is_refused_at_the_line_that_was_written(write) -> None:
    where = "must not lie within each other"
    assert complaints(write("device: cpu\nspool:\n  dir: /var\n")) == [
        f"r.yaml:3: models.dir: /var/models and spool.dir /var {where}",
        f"r.yaml:3: state.dir: /var/lib/retraind and spool.dir /var {where}",
    ]


def test_all_mistakes_are_told_at_once_in_the_order_of_lines(write) -> None:
    path = write(
        """\
training:
  epochs: 0
  sed: 1
metrics:
  listen: 127.0.0.1:70000
spool:
  dir: null
models: {dir: /x}
state: {dir: /x/y}
device: gpu
"""
    )
    assert complaints(path) == [
        "r.yaml:2: training.epochs: must be at least 1, not 0",
        "r.yaml:3: training.sed: unknown key (did you mean training.seed?)",
        "r.yaml:5: metrics.listen: port 70000 is above 65535",
        "r.yaml:7: spool.dir: has no value",
        "r.yaml:9: state.dir: /x/y and models.dir /x must not lie within each other",
        "r.yaml:10: device: must be one of auto, cuda, cpu, not 'gpu'",
    ]


def test_every_alias_anchor_and_tag_is_told_with_its_line(write) -> None:
    path = write("log: &l\n  level: info\nspool: *l\ndevice: !x gpu\n")
    assert complaints(path) == [
        f"r.yaml:1: {NO_ALIASES}",
        "r.yaml:2: spool.level: unknown key (did you mean log.level?)",
        f"r.yaml:3: {NO_ALIASES}",
        f"r.yaml:4: {NO_ALIASES}",
        "r.yaml:4: device: must be one of auto, cuda, cpu, not 'gpu'",
    ]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert complaints(tmp_path / "r.yaml") == ["r.yaml: No such file or directory"]


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").mkdir()
    assert complaints(tmp_path / "r.yaml") == ["r.yaml: Is a directory"]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("training: {learning_rate: 1e-3}", "training.learning_rate", 1e-3),
        ("training: {learning_rate: 2}", "training.learning_rate", 2.0),
        ("training: {learning_rate: .5}", "training.learning_rate", 0.5),
        ("training: {seed: 9223372036854775807}", "training.seed", 2**63 - 1),
        ("training: {seed: '007'}", "training.seed", 7),
        ("training: {warm_start: true}", "training.warm_start", True),
        ("training: {warm_start: false}", "training.warm_start", False),
        ("models: {name: no}", "models.name", "no"),
        ("models: {name: 1e3}", "models.name", "1e3"),
        ("models: {name: 0x1f}", "models.name", "0x1f"),
        ("gate: {max_heldout_loss: null}", "gate.max_heldout_loss", None),
        ("gate: {max_heldout_loss: 1e-1}", "gate.max_heldout_loss", 0.1),
        ("metrics: {listen: ':80'}", "metrics.listen", ":80"),
        ("metrics: {listen: '[::1]:0'}", "metrics.listen", "[::1]:0"),
        ("metrics:\n  listen: localhost:80", "metrics.listen", "localhost:80"),
        ("spool: {dir: /a b/ä}", "spool.dir", Path("/a b/ä")),
    ],
)
def test_a_value_is_read_as_the_type_of_its_key(write, text: str, key: str, value: object) -> None:
    found = get_key(config_file.load(write(text)), key)
    assert found == value
    assert type(found) is type(value) or isinstance(found, Path)


def test_relative_paths_are_relative_to_the_file_wherever_the_service_starts(write, tmp_path, monkeypatch) -> None:
    path = write("spool: {dir: s}\nmodels: {dir: ./m}\nstate: {dir: ../t}\nworker: {python: venv/bin/python}\n")
    config = config_file.load(path)
    assert config.spool.dir == tmp_path / "s"
    assert config.models.dir == tmp_path / "m"
    assert config.state.dir == tmp_path / "../t"
    assert config.worker.python == str(tmp_path / "venv/bin/python")
    monkeypatch.chdir(tmp_path)
    assert config_file.load(Path("r.yaml")) == config


def test_how_often_training_is_kept_makes_no_old_content_new() -> None:
    fingerprints = {
        seconds: settings_fingerprint(Config(training=TrainingConfig(checkpoint_seconds=seconds)))
        for seconds in (None, 1.0, 60.0)
    }
    assert len(set(fingerprints.values())) == 1
    assert settings_fingerprint(Config(training=TrainingConfig(seed=1))) != fingerprints[60.0]


def test_the_default_interpreter_is_no_path(write) -> None:
    assert config_file.load(write("worker: {python: auto}\n")).worker.python == "auto"


def test_a_file_that_passes_can_be_sent_to_a_worker(write) -> None:
    config = config_file.load(write(f"data: {{max_bytes: {2**63 - 1}, min_rows: {2**63 - 1}}}\n"))
    assert msgspec.json.decode(msgspec.json.encode(config.data), type=type(config.data)) == config.data
