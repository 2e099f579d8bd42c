"""What is said of the worker's interpreter; and none, however strange, hangs or breaks the command."""

import re
import sys
from pathlib import Path

import msgspec
import pytest

from retraind.commands import interpreter
from retraind.commands.interpreter import Answer, judge
from retraind.config import Config, WorkerConfig
from retraind.worker.preflight import MIN_PYTHON, MIN_TORCH, torch_version

GOOD = Answer(python=(3, 13, 5), missing={}, torch="2.6.0+debian", cuda="", num_gpus=0)


def changed(**changes: object) -> Answer:
    return msgspec.structs.replace(GOOD, **changes)


@pytest.mark.parametrize(
    ("answer", "device", "gpu_on_bus", "status", "says"),
    [
        (GOOD, "auto", False, "pass", "Python 3.13.5, torch 2.6.0+debian, no CUDA"),
        (GOOD, "cpu", True, "pass", "no CUDA"),
        (changed(cuda="12.4", num_gpus=2), "auto", True, "pass", "CUDA 12.4, 2 GPU"),
        (changed(cuda="12.4", num_gpus=1), "cuda", True, "pass", "1 GPU"),
        (changed(cuda="12.4"), "cpu", True, "pass", "CUDA 12.4"),
        (changed(cuda="12.4"), "auto", False, "pass", "CUDA 12.4"),
        (GOOD, "auto", True, "warn", "training on the CPU"),
        (GOOD, "auto", True, "warn", "a CUDA build of torch"),
        (changed(cuda="12.4"), "auto", True, "warn", "nvidia-smi"),
        (GOOD, "cuda", True, "fail", "device is cuda"),
        (GOOD, "cuda", False, "fail", "a CUDA build of torch"),
        (changed(cuda="12.4"), "cuda", True, "fail", "the driver does not answer"),
        (changed(torch="2.5.1"), "auto", False, "fail", "needs Python 3.11 and torch 2.6"),
        (changed(torch="1.13"), "auto", False, "fail", "too old"),
        (changed(torch="nonsense"), "auto", False, "fail", "too old"),
        (changed(torch="3.0.0"), "auto", False, "pass", "torch 3.0.0"),
        (changed(python=(3, 9, 2)), "auto", False, "fail", "needs Python 3.11"),
        (
            changed(missing={"torch": "ImportError: libcuda"}),
            "auto",
            False,
            "fail",
            "can not import torch (ImportError",
        ),
        (changed(missing={"numpy": "a", "pandas": "b"}), "cpu", False, "fail", "pandas (b)"),
    ],
)
def test_the_verdict_follows_from_the_answer(
    answer: Answer, device: str, gpu_on_bus: bool, status: str, says: str
) -> None:
    check = judge("/opt/python", answer, device, gpu_on_bus=gpu_on_bus)
    assert check.status == status
    assert says in f"{check.message}. {check.remedy}"
    assert check.message.startswith("/opt/python: ")
    assert (check.remedy == "") == (status == "pass"), "what is not well has a remedy"


def ask(python: str) -> object:
    return interpreter.check(Config(device="cpu", worker=WorkerConfig(python=python)))


def test_this_interpreter_answers() -> None:
    check = interpreter.check(Config(device="cpu"))
    assert check.status == "pass"
    assert f"{sys.executable}: Python {sys.version_info[0]}.{sys.version_info[1]}" in check.message


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exit 3", "exit status 3"),
        ("echo hello", "does not answer as a Python does"),
        ("echo '{\"python\": 3}'", "does not answer as a Python does"),
        ("echo broken >&2; exit 1", "broken"),
        ("printf '\\377\\376' >&2; printf '\\377'", "does not answer as a Python does"),
    ],
)
def test_what_is_no_python_is_named_with_what_it_said(tmp_path: Path, script: str, says: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    check = ask(str(python))
    assert (check.status, says in check.message) == ("fail", True), check
    assert "apt install python3-torch" in check.remedy


def test_a_path_that_is_not_there_or_may_not_be_run_is_named(tmp_path: Path) -> None:
    assert "No such file" in ask(str(tmp_path / "nowhere")).message
    (tmp_path / "plain").write_text("")
    assert "Permission denied" in ask(str(tmp_path / "plain")).message


def test_an_interpreter_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 3600\n")
    python.chmod(0o755)
    monkeypatch.setattr(interpreter, "_SECONDS", 0.2)
    assert "no answer within" in ask(str(python)).message


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.6.0+debian", (2, 6)), ("2.13.0+cpu", (2, 13)), ("2.7.0a0+git1", (2, 7)), ("", (0, 0)), ("x.y", (0, 0))],
)
def test_the_version_of_torch_is_read_from_all_its_spellings(text: str, version: tuple[int, int]) -> None:
    assert torch_version(text) == version


def test_the_oldest_versions_are_those_of_the_project_file() -> None:
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert f'"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}"' in project
    assert re.search(rf'requires-python = ">={MIN_PYTHON[0]}\.{MIN_PYTHON[1]}"', project)
