"""Completion in a real bash on a terminal, held against the parser: with bash-completion's functions and without."""

import argparse
import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from retraind import cli
from retraind.job import Job, JobState
from retraind.supervisor import holds

COMPLETION = Path(__file__).resolve().parents[2] / "etc" / "bash-completion" / "retraind"
LIBRARY = Path("/usr/share/bash-completion/bash_completion")
SECONDS = 20
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

# The keys that a test presses: M-* inserts every completion, C-x p lets the shell write its line down.
RC = """\
PS1='ready> '
show() {{ printf '%s\\n' "$READLINE_LINE" >"$ANSWER.new"; mv "$ANSWER.new" "$ANSWER"; }}
bind -x '"\\C-xp": show'
{source}
"""


class Shell:
    """An interactive bash that tells what a press of the completion key would offer."""

    def __init__(self, directory: Path, source: str) -> None:
        self._answer = directory / "answer"
        rc = directory / "rc"
        rc.write_text(RC.format(source=source))
        (directory / "bin").mkdir()
        program = directory / "bin" / "retraind"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m retraind "$@"\n')
        program.chmod(0o755)
        self.files = directory / "files"
        (self.files / "models").mkdir(parents=True)
        for name in ("a.csv", "two words.csv"):
            (self.files / name).touch()
        (directory / "user" / "completions").mkdir(parents=True)
        (directory / "user" / "completions" / "retraind").symlink_to(COMPLETION)
        environment = {
            **os.environ, "TERM": "dumb", "INPUTRC": "/dev/null", "HISTFILE": "", "HOME": str(directory),
            "PATH": f"{program.parent}:{os.environ['PATH']}", "ANSWER": str(self._answer),
            "BASH_COMPLETION_USER_DIR": str(directory / "user"), "LC_ALL": "C",
        }  # fmt: skip
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(self.files)
            os.execvpe("bash", ["bash", "--noprofile", "--rcfile", str(rc), "-i"], environment)
        self.said = b""
        self._until(lambda: b"ready> " in self.said)

    def _until(self, condition) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.said
            if select.select([self._terminal], [], [], 0.005)[0]:
                self.said += os.read(self._terminal, 4096)

    def complete(self, line: str) -> str:
        """The line with every completion in it."""
        self._answer.unlink(missing_ok=True)
        os.write(self._terminal, line.encode() + b"\x1b*\x18p")
        self._until(self._answer.exists)
        os.write(self._terminal, b"\x15")
        return self._answer.read_text().removesuffix("\n")

    def offers(self, line: str) -> list[str]:
        """The words that are offered in the place of the line's last one."""
        completed = self.complete(line)
        if completed == line:
            return []
        num_before = len(shlex.split(line)) - (not line.endswith(" "))
        return shlex.split(completed)[num_before:]

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._terminal)


@pytest.fixture(scope="module", params=["plain", "strict", "library"])
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """`plain` sources the file twice, `strict` under `set -u`, `library` lets bash-completion find it by its name."""
    if request.param == "library" and not LIBRARY.exists():
        pytest.skip(f"bash-completion is not installed: no {LIBRARY}")
    own = f"source {shlex.quote(str(COMPLETION))}"
    source = {"plain": f"{own}\n{own}", "strict": f"set -u\n{own}", "library": f"source {LIBRARY}"}[request.param]
    shell = Shell(tmp_path_factory.mktemp(request.param), source)
    yield shell
    shell.close()
    assert b"unbound" not in shell.said
    assert b"bash:" not in shell.said


def actions(verb: str = "") -> list[argparse.Action]:
    found = cli.build_parser()._actions
    return next(action.choices[verb]._actions for action in found if action.dest == "verb") if verb else found


VERBS = list(next(action.choices for action in actions() if action.dest == "verb"))
VALUES = [(verb, action) for verb in VERBS for action in actions(verb) if action.option_strings and action.nargs != 0]


def test_every_verb_is_offered_and_nothing_else(shell: Shell) -> None:
    assert sorted(shell.offers("retraind ")) == sorted(VERBS)
    assert shell.offers("retraind pre") == ["preflight"]


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_every_option_is_offered_and_nothing_else(shell: Shell, verb: str) -> None:
    options = {name for action in actions(verb) for name in action.option_strings}
    assert set(shell.offers(f"retraind {verb} -".replace("  ", " "))) == options


@pytest.mark.parametrize(("verb", "action"), VALUES, ids=lambda value: getattr(value, "dest", value))
def test_the_value_of_an_option_is_a_choice_a_file_a_directory_or_left_to_the_person(
    shell: Shell, verb: str, action: argparse.Action
) -> None:
    everything = ["a.csv", "models", "two words.csv"]
    offered = sorted(action.choices) if action.choices else {"FILE": everything, "DIR": ["models"]}.get(action.metavar)
    for option in action.option_strings:
        assert sorted(shell.offers(f"retraind {verb} {option} ")) == (offered or [])


def test_a_value_behind_an_equals_sign_is_completed_too(shell: Shell) -> None:
    assert shell.complete("retraind train --device=cp") == "retraind train --device=cpu "
    assert shell.complete("retraind check --config=a") == "retraind check --config=a.csv "
    assert shell.complete("retraind train --models=") == "retraind train --models=models "


@pytest.mark.parametrize("verb", VERBS)
def test_names_of_files_are_offered_where_the_verb_takes_files(shell: Shell, verb: str) -> None:
    takes_files = any(not action.option_strings and action.metavar == "FILE" for action in actions(verb))
    assert shell.offers(f"retraind {verb} two") == (["two words.csv"] if takes_files else [])
    assert shell.offers(f"retraind {verb} --config a.csv two") == (["two words.csv"] if takes_files else [])


def test_a_name_is_quoted_for_the_shell(shell: Shell) -> None:
    assert shell.complete("retraind inspect --json tw") == r"retraind inspect --json two\ words.csv "


def test_the_value_of_an_option_is_not_taken_for_the_verb(shell: Shell) -> None:
    assert shell.offers("retraind --version --js") == []
    assert shell.offers("retraind train --seed 3 a.csv --ep") == ["--epochs"]
    assert shell.offers("retraind train -- --ep") == []


def test_an_unknown_verb_gets_nothing(shell: Shell) -> None:
    assert shell.offers("retraind learn ") == []
    assert shell.offers("retraind learn -") == []


def write_jobs(directory: Path, states: dict[str, JobState]) -> Path:
    """Records of jobs, and the configuration that leads to them."""
    now = datetime(2026, 12, 1, tzinfo=UTC)
    for number, (name, state) in enumerate(states.items()):
        job = Job(id=name, name=f"{name}.csv", state=state, created_at=now, updated_at=now)
        home = directory / "state" / "jobs" / f"{number}"
        home.mkdir(parents=True)
        (home / "job.json").write_bytes(msgspec.json.encode(job))
    config = directory / "jobs.yaml"
    config.write_text("spool: {dir: spool}\nmodels: {dir: models}\nstate: {dir: state}\n")
    return config


def test_a_job_to_queue_again_is_one_whose_file_is_in_quarantine(shell: Shell, tmp_path: Path) -> None:
    config = write_jobs(tmp_path, {f"20261201T020138Z-{state.value}": state for state in JobState})
    held = [f"20261201T020138Z-{state}" for state in ("quarantined", "rejected")]
    assert shell.offers(f"retraind requeue --config {config} ") == held
    assert shell.offers(f"retraind requeue --config={config} 20261201T020138Z-r") == held[1:]
    assert shell.offers(f"retraind requeue --config {config} {held[0]} ") == []


def test_a_job_to_hold_is_open_and_one_to_release_is_held(shell: Shell, tmp_path: Path) -> None:
    config = write_jobs(tmp_path, {f"20261201T020138Z-{state.value}": state for state in JobState})
    held = "20261201T020138Z-deferred"
    holds.place(tmp_path / "state", held)
    queued, running = (f"20261201T020138Z-{state}" for state in ("queued", "running"))
    assert shell.offers(f"retraind hold --config {config} ") == [queued, running]
    assert shell.complete(f"retraind release --config {config} 2").split()[-1] == held
    assert shell.offers(f"retraind release --config {config} {held} ") == []


def test_records_that_can_not_be_read_offer_nothing_and_say_nothing(shell: Shell, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("state: [\n")
    said = len(shell.said)
    assert shell.offers(f"retraind requeue --config {broken} ") == []
    assert b"YAML" not in shell.said[said:]


def test_what_a_record_holds_is_not_run(shell: Shell, tmp_path: Path) -> None:
    """The shell may be root's, and the records are written by the service's user."""
    proof = tmp_path / "proof"
    config = write_jobs(tmp_path, {f"$(touch {proof})": JobState.QUARANTINED, "`id`": JobState.REJECTED})
    assert shell.offers(f"retraind requeue --config {config} ") == []
    assert not proof.exists()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", str(COMPLETION)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
