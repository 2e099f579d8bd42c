"""The command line as people and scripts use it: real processes, exit statuses, what is printed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Service, eventually

from retraind.cli import build_parser

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


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "retraind", *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=cwd,
    )  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration on directories that do not exist yet."""
    path = tmp_path / "retraind.yaml"
    path.write_text(
        "spool: {dir: spool}\nmodels: {dir: models}\nstate: {dir: state}\nmetrics: {listen: '127.0.0.1:0'}\n"
    )
    return path


def test_every_verb_has_a_help_that_a_person_can_learn_from() -> None:
    listed = build_parser().format_help()
    for verb in VERBS:
        shown = run(verb, "--help")
        assert shown.returncode == 0
        assert f"\n    {verb}" in listed
        assert len(shown.stdout.splitlines()) > 8, "more than the list of options"


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("frobnicate",), ("train",), ("requeue",), ("jobs", "--limit", "many"), ("--config", "x"),
        ("inspect", "/nowhere/a.csv"), ("train", "/nowhere/a.csv", "--models", "m"),
        ("requeue", "J", "--all-quarantined"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_end_with_64_and_one_line_of_reason(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.returncode == 64
    assert result.stdout == ""
    assert "retraind" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_a_broken_configuration_ends_with_78_whatever_is_asked(verb: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("spool: {dri: x}\n")
    files = [str(tmp_path / "c.yaml")] if verb in ("inspect", "train", "score") else []
    files += {"requeue": ["--all-quarantined"], "hold": ["--all"], "release": ["--all"]}.get(verb, [])
    result = run(verb, *files, "--config", str(tmp_path / "c.yaml"))
    assert result.returncode == 78
    assert result.stderr == f"{tmp_path}/c.yaml:1: spool.dri: unknown key (did you mean spool.dir?)\n"


def test_before_the_first_start_every_question_has_an_answer(config: Path) -> None:
    status, jobs, models = (run(verb, "--config", str(config)) for verb in ("status", "jobs", "models"))
    assert (status.returncode, jobs.returncode, models.returncode) == (69, 0, 0)
    assert "no service has run here yet" in status.stdout
    assert f"drop a file into {config.parent / 'spool' / 'incoming'}" in jobs.stdout
    assert "nothing published yet" in models.stdout
    assert json.loads(run("jobs", "--json", "--config", str(config)).stdout) == []
    assert json.loads(run("status", "--json", "--config", str(config)).stdout) == {"running": False, "status": None}
    assert not (config.parent / "state").exists(), "looking makes nothing"


def test_check_tries_everything_a_start_needs_and_changes_nothing(config: Path) -> None:
    result = run("check", "--json", "--config", str(config))
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.returncode == 0
    assert checks.pop("metrics.web_config")["status"] == "skip"
    assert {check["status"] for check in checks.values()} == {"pass"}
    assert "torch" in checks["worker.python"]["message"]
    assert sorted(path.name for path in config.parent.iterdir()) == ["retraind.yaml"]


def test_check_names_each_obstacle(config: Path) -> None:
    (config.parent / "spool").write_text("in the way")
    config.write_text(config.read_text() + "worker: {python: /nowhere/python}\n")
    result = run("check", "--json", "--config", str(config))
    failed = {check["name"] for check in json.loads(result.stdout)["checks"] if check["status"] == "fail"}
    assert (result.returncode, failed) == (69, {"spool.dir", "worker.python"})


def test_check_looks_for_the_programs_that_are_asked_for(config: Path) -> None:
    config.write_text(config.read_text() + "publish: {hook: [sh, -c, 'exit 3'], sign: [/nowhere/sign, --key, a]}\n")
    done = run("check", "--config", str(config), "--json")
    found = {check["name"]: check["status"] for check in json.loads(done.stdout)["checks"]}
    assert (found["publish.hook"], found["publish.sign"], done.returncode) == ("pass", "fail", 69)


def test_check_names_what_the_workers_interpreter_lacks(config: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    config.write_text(config.read_text() + f"worker: {{python: {bare}/bin/python}}\n")
    result = run("check", "--config", str(config))
    assert result.returncode == 69
    assert "No module named" in result.stdout


def test_preflight_lists_checks_with_a_status_each(config: Path) -> None:
    result = run("preflight", "--json", "--config", str(config))
    checks = json.loads(result.stdout)["checks"]
    assert result.returncode in (0, 1)
    assert {"host.memory", "host.disk", "host.cpu", "gpu.present"} <= {check["name"] for check in checks}
    assert {check["status"] for check in checks} <= {"pass", "warn", "fail", "skip", "unknown"}
    for_people = run("preflight", "--config", str(config)).stdout
    assert "CHECK" in for_people
    assert "host.memory" in for_people


def test_preflight_fails_with_2_when_a_gpu_is_demanded_and_there_is_none(config: Path, tmp_path: Path) -> None:
    config.write_text("device: cuda\n" + config.read_text())
    (tmp_path / "no-hardware").mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "retraind", "preflight", "--config", str(config)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "RETRAIND_SYSROOT": str(tmp_path / "no-hardware")},
    )  # fmt: skip
    assert result.returncode == 2
    assert "gpu.present" in result.stdout


def test_jobs_and_models_show_what_happened(service: Service) -> None:
    service.drop("good.csv")
    service.drop("refuse.csv")
    service.wait_for_state("good.csv", "published")
    service.wait_for_state("refuse.csv", "quarantined")
    lines = service.command("jobs").stdout.splitlines()
    assert any("good.csv" in line and str(service.live()["version"]) in line for line in lines)
    assert any("refuse.csv" in line and "malformed at line 3, column 2" in line for line in lines)
    assert len(service.command("jobs", "--limit", "1").stdout.splitlines()) == 4
    assert len(json.loads(service.command("jobs", "--json", "--limit", "1").stdout)) == 1
    assert len(json.loads(service.command("jobs", "--json").stdout)) == 2
    listed = json.loads(service.command("models", "--json").stdout)
    assert listed["live"] == service.live()["version"]
    assert listed["versions"][0]["dataset"]["name"] == "good.csv"
    assert "live" in service.command("models").stdout


def test_output_that_nobody_reads_to_its_end_is_no_error(service: Service) -> None:
    service.drop("good.csv")
    service.wait_for_state("good.csv", "published")
    command = f"{sys.executable} -m retraind jobs --json --config {service.config_path} | true; echo ${{PIPESTATUS[0]}}"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (shown.stdout.strip(), shown.stderr) == ("0", "")


def test_a_directory_that_is_closed_to_a_user_does_not_look_empty(service: Service) -> None:
    if os.geteuid() != 0:
        service.state.chmod(0)
        result = service.command("jobs")
        service.state.chmod(0o700)
        assert result.returncode == 69
        assert "is closed to this user" in result.stderr
        return
    pytest.skip("root may read every directory")


def test_the_foreground_run_follows_links_that_a_person_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{number},{number * 2}\n" for number in range(100)))
    (tmp_path / "link.csv").symlink_to("a.csv")
    found = json.loads(run("inspect", "--json", str(tmp_path / "link.csv")).stdout)
    assert (found["name"], found["num_rows"]) == ("a.csv", 100)


def test_a_second_look_at_the_status_never_stops_a_service_from_starting(make_service) -> None:
    service = make_service()
    service.state.mkdir()
    looks = [
        subprocess.Popen([sys.executable, "-m", "retraind", "status", "--config", str(service.config_path)],
                         stdout=subprocess.DEVNULL)
        for _ in range(4)
    ]  # fmt: skip
    service.start()
    for look in looks:
        look.wait(60)
    eventually(lambda: service.status()["state"] == "idle")


def test_inspect_shows_what_the_operator_asked_for(tmp_path: Path) -> None:
    rows = "".join(f"{1_780_000_000 + number},{5 * number},{number % 3},1\n" for number in range(100))
    (tmp_path / "a.csv").write_text("when,a_total,load,spare\n" + rows)
    (tmp_path / "c.yaml").write_text("data: {counters: auto, exclude: [sp*], schema: {when: time}}\n")
    shown = run("inspect", str(tmp_path / "a.csv"), "--config", str(tmp_path / "c.yaml")).stdout
    assert re.search(r"^rates per second +a_total$", shown, re.MULTILINE)
    assert re.search(r"^ignored +when \(time\), spare \(excluded\)$", shown, re.MULTILINE)
    assert re.search(r"^a_total +5 ", shown, re.MULTILINE)
