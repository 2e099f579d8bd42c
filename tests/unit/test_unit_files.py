"""The files for systemd: what its own tools say of them, and where they must agree with the code."""

import configparser
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retraind import config_file
from retraind.config import Config, get_key
from retraind.errors import ConfigError
from retraind.supervisor import spool

SYSTEMD_DIR = Path(__file__).resolve().parents[2] / "systemd"
UNIT = SYSTEMD_DIR / "retraind.service"
UNITS = sorted(SYSTEMD_DIR.glob("*.service"))
EXAMPLES = sorted((SYSTEMD_DIR / "examples").glob("*.conf"))
# What systemd before 254 does not know, and what a machine without the package lacks; any other complaint is a fault.
KNOWN = re.compile(
    r"service type, ignoring: notify-reload|Unknown key '(RestartSteps|RestartMaxDelaySec|RestartMode)'"
    r"|Command /usr/(bin/retraind|lib/retraind/retraind-failure) is not executable|Command 'man retraind"
)
analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def directives() -> dict[str, list[str]]:
    """Every directive of [Service] with all its values, in order."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def one(name: str) -> str:
    (value,) = directives()[name]
    return value


def tmpfiles() -> dict[str, tuple[int, str, str]]:
    """Mode, user and group by path."""
    lines = [line.split() for line in (SYSTEMD_DIR / "retraind.tmpfiles").read_text().splitlines()]
    return {fields[1]: (int(fields[2], 8), fields[3], fields[4]) for fields in lines if fields[0] == "d"}


def complaints(unit: Path) -> list[str]:
    command = ["systemd-analyze", "verify", "--man=no", unit]
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{unit.parent}:"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return [line for line in result.stderr.splitlines() if "retraind" in line and not KNOWN.search(line)]


@analyze
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_no_mistake_in_the_units(unit: Path) -> None:
    assert complaints(unit) == []


@pytest.fixture
def with_drop_in(tmp_path: Path) -> Callable[[Path], Path]:
    def make(drop_in: Path) -> Path:
        directory = tmp_path / "retraind.service.d"
        directory.mkdir()
        for unit in UNITS:
            shutil.copy(unit, tmp_path)
        shutil.copy(drop_in, directory)
        return tmp_path / UNIT.name

    return make


@analyze
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_systemd_finds_no_mistake_in_the_unit_with_an_example_of_a_drop_in(with_drop_in, example: Path) -> None:
    assert complaints(with_drop_in(example)) == []


@analyze
def test_a_mistake_in_a_drop_in_would_be_found(with_drop_in, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.conf"
    wrong.write_text("[Service]\nMemoryMaxx=1G\n")
    (complaint,) = complaints(with_drop_in(wrong))
    assert "MemoryMaxx" in complaint


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_says_where_it_belongs_and_names_only_keys_that_exist(example: Path) -> None:
    text = example.read_text()
    assert f"/etc/systemd/system/retraind.service.d/{example.name}" in " ".join(text.replace("#", " ").split())
    keys = set(re.findall(r"(?<![-\w])((?:spool|metrics|intake|models|worker)\.[a-z_]+)\b", text))
    assert keys <= set(config_file.all_keys())


def test_the_last_word_on_a_failure_is_said_once_and_by_a_script_that_is_shipped() -> None:
    assert "OnFailure=retraind-failure.service" in UNIT.read_text()
    assert one("RestartMode") == "direct", "otherwise every restart would be told"
    result = subprocess.run(
        [SYSTEMD_DIR / "retraind-failure"], capture_output=True, text=True, check=True,
        env={"MONITOR_SERVICE_RESULT": "exit-code", "MONITOR_EXIT_CODE": "exited", "MONITOR_EXIT_STATUS": "78"},
    )  # fmt: skip
    assert result.stdout.startswith("<2>retraind.service has failed (exit-code, exited 78): the configuration has")


@analyze
def test_systemd_judges_the_sandbox_as_tight() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", UNIT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_unit_is_plain_ini_with_its_three_sections() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(UNIT)
    assert parser.sections() == ["Unit", "Service", "Install"]
    assert parser["Service"]["ExecStart"] == "/usr/bin/retraind serve --config /etc/retraind/retraind.yaml"
    assert parser["Service"]["Type"] == "notify-reload"


def test_the_worker_has_its_stop_time_before_systemd_kills() -> None:
    assert float(one("TimeoutStopSec")) > Config().worker.stop_seconds


def test_a_broken_configuration_is_not_restarted() -> None:
    assert one("Restart") == "on-failure"
    assert int(one("RestartPreventExitStatus")) == ConfigError.exit_status


def test_the_watchdog_leaves_time_for_three_answers_between_two_waits() -> None:
    loop = (Path(spool.__file__).parent / "loop.py").read_text()
    longest_wait = float(re.search(r"_LONGEST_WAIT_SECONDS = ([0-9.]+)", loop)[1])
    assert float(one("WatchdogSec")) / 3 > longest_wait


@pytest.mark.parametrize("key", ["spool.dir", "models.dir", "state.dir"])
def test_the_sandbox_lets_the_service_write_where_it_does_by_default(key: str) -> None:
    writable = [Path(path) for path in one("ReadWritePaths").split()]
    writable.append(Path("/var/lib") / one("StateDirectory"))
    path = get_key(Config(), key)
    assert any(path.is_relative_to(parent) for parent in writable)
    assert one("ProtectSystem") == "strict", "otherwise the list would not matter"


def test_every_path_that_must_be_there_at_the_start_is_made_by_tmpfiles() -> None:
    assert set(one("ReadWritePaths").split()) <= set(tmpfiles())


def test_caches_of_libraries_stay_below_the_cache_directory() -> None:
    cache = Path("/var/cache") / one("CacheDirectory")
    values = " ".join(directives()["Environment"]).split()
    environment = dict(value.split("=", 1) for value in values)
    for name in ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert Path(environment[name]).is_relative_to(cache), name


def test_gpus_are_reachable_and_nothing_else_in_dev() -> None:
    assert "PrivateDevices" not in directives(), "it hides /dev/nvidia*"
    assert one("DevicePolicy") == "closed"
    assert {value.split()[0] for value in directives()["DeviceAllow"]} >= {"char-nvidia", "char-nvidia-frontend"}


def test_proc_shows_what_the_preflight_reads() -> None:
    assert "ProcSubset" not in directives(), "it hides /proc/meminfo and /proc/driver/nvidia"


def test_the_spools_directories_have_the_modes_that_the_service_gives_them(tmp_path: Path) -> None:
    root = tmp_path / "spool"
    spool.Spool(root).open()
    made = {path.name: path.stat().st_mode & 0o7777 for path in root.iterdir() if path.is_dir()}
    prefix = f"{Config().spool.dir}/"
    declared = {path.removeprefix(prefix): mode for path, (mode, _, _) in tmpfiles().items() if path.startswith(prefix)}
    assert made == declared
    assert tmpfiles()[f"{prefix}incoming"] == (0o3730, "retraind", "retraind-drop")


def test_consumers_can_read_the_models() -> None:
    assert tmpfiles()[str(Config().models.dir)] == (0o755, "retraind", "retraind")


def test_nothing_that_is_dropped_ages_away() -> None:
    lines = [line for line in (SYSTEMD_DIR / "retraind.tmpfiles").read_text().splitlines() if line.startswith("d")]
    assert len(lines) == len(tmpfiles())
    assert all(line.split()[5] == "-" for line in lines)


def test_users_and_groups_of_unit_and_tmpfiles_are_created() -> None:
    lines = [line.split() for line in (SYSTEMD_DIR / "retraind.sysusers").read_text().splitlines()]
    users = {fields[1] for fields in lines if fields[0] == "u"}
    groups = users | {fields[1] for fields in lines if fields[0] == "g"}
    assert {one("User"), *(user for _, user, _ in tmpfiles().values())} <= users
    assert {one("Group"), *(group for _, _, group in tmpfiles().values())} <= groups
    assert ["m", one("User"), "retraind-drop"] in lines, "the service reads files by the group of incoming/"


def test_a_claim_sets_no_bit_that_the_sandbox_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = spool.Spool(tmp_path / "spool")
    place.open()
    (place.incoming / "a.csv").write_text("x\n")
    chmod = Path.chmod

    def chmod_in_the_sandbox(path: Path, mode: int, **options: bool) -> None:
        if mode & 0o6000:
            raise PermissionError(1, "Operation not permitted", str(path))
        chmod(path, mode, **options)

    assert one("RestrictSUIDSGID") == "yes"
    monkeypatch.setattr(Path, "chmod", chmod_in_the_sandbox)
    place.claim(b"a.csv", "job-1")
    assert (place.active / "job-1" / "a.csv").read_text() == "x\n"
