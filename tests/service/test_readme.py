"""The README's own lines, run as they stand there: only the paths of the system are put below a test's directory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Service

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
BAD_ROWS = "".join(f"{i},{i % 7},x{i}\n" if i % 2 else f"{i},oops,{i}\n" for i in range(50))


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; of scripts those that are marked as tested."""
    mark = "" if language == "console" else "<!-- tested -->\n"
    return re.findall(rf"{mark}```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory):
    """A service that has seen one good file, dropped as the README says, and one bad file."""
    root = tmp_path_factory.mktemp("readme")
    service = Service(root, fake=False).start()
    try:
        rows = "".join(f"2026-01-01T00:{i % 60:02d}Z,{i % 7},{i % 11 - 5},{i % 3}.5\n" for i in range(400))
        (root / "node-42.csv").write_text("timestamp,load,temperature,busy\n" + rows)
        for script in blocks("sh")[:1]:
            run(service, script)
        service.wait_for_state("node-42.csv", "published")
        for name in ("node-42.csv", "today.csv"):
            (root / name).write_text("timestamp,load,temperature,busy\n" + rows)
        service.drop("node-07.csv", "time,cpu,mem\n" + BAD_ROWS)
        service.wait_for_state("node-07.csv", "quarantined")
        yield service
    finally:
        service.close()


def here(service: Service, text: str) -> str:
    return text.replace("/var/spool/retraind", str(service.spool)).replace("/var/models", str(service.models))


def run(service: Service, script: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell script with `retraind` on the path, told where this service's configuration lies."""
    bin_dir = service.root / "bin"
    bin_dir.mkdir(exist_ok=True)
    command = bin_dir / "retraind"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m retraind "$@" --config "{service.config_path}"\n')
    command.chmod(0o755)
    return subprocess.run(
        ["sh", "-euc", here(service, script)], cwd=service.root, capture_output=True, text=True, timeout=120,
        check=True, env={**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}"},
    )  # fmt: skip


def test_the_producers_lines_get_a_file_trained(ran: Service) -> None:
    assert ran.live()["dataset"]["name"] == "node-42.csv"
    assert len(blocks("sh")) == 2, "the producer's and the operator's"


def test_the_consumers_lines_load_one_version_and_see_a_strange_row(ran: Service) -> None:
    script = here(ran, "".join(blocks("python"))) + "print(version, *errors.tolist(), *scores)\n"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True, cwd="/"
    )
    version, *numbers = done.stdout.split()
    window = ran.live()["shape"]["window"]
    figures = [float(number) for number in numbers]
    errors, scores = figures[: 2 * window + 1], figures[2 * window + 1 :]
    assert version == ran.live()["version"]
    assert len(scores) == 3 * window
    assert errors[-1] > errors[0]
    assert scores[-1] > 1 > scores[0]


def test_the_scores_of_a_file_are_those_of_its_array(ran: Service) -> None:
    rows = "numpy.loadtxt('today.csv', delimiter=',', skiprows=1, usecols=(1, 2, 3))"
    home = ran.models / "telemetry_autoencoder"
    script = f"import numpy, retraind\nprint(*retraind.load_model({str(home)!r}).score({rows}).tolist())\n"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True, cwd=ran.root
    )
    scored = run(ran, "retraind score today.csv --format jsonl").stdout.splitlines()
    assert len(scored) == 400
    assert [json.loads(line)["score"] for line in scored] == pytest.approx(
        [float(score) for score in done.stdout.split()], rel=1e-5
    )


def test_the_consumers_lines_refuse_weights_with_a_flipped_bit(ran: Service, tmp_path: Path) -> None:
    version = (ran.models / "telemetry_autoencoder" / "current").resolve()
    copy = tmp_path / "telemetry_autoencoder" / "versions" / version.name
    copy.mkdir(parents=True)
    (copy.parent.parent / "current").symlink_to(f"versions/{version.name}")
    data = bytearray((version / "weights.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "weights.pt").write_bytes(data)
    (copy / "manifest.json").write_bytes((version / "manifest.json").read_bytes())
    script = blocks("python")[0].replace("/var/models", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert f"Damaged: {copy} is damaged" in done.stderr


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.split("\n")[0].removeprefix("$ "))
def test_what_the_readme_shows_is_what_a_command_prints(ran: Service, block: str) -> None:
    command, _, shown = block.removeprefix("$ ").partition("\n")
    printed = run(ran, command).stdout
    assert _labels(shown)[0] == _labels(printed)[0]
    if not shown.startswith(("JOB", "VERSION", "time,")):
        assert [line[0] for line in _labels(shown)] == [line[0] for line in _labels(printed)][: len(_labels(shown))]


def _labels(text: str) -> list[list[str]]:
    """The columns of each line, rules left out, keys of JSON without their values."""
    lines = [re.sub(r'^(  "\w+":) .*', r"\1", line) for line in text.splitlines()]
    return [re.split(r"\s{2,}", line.strip()) for line in lines if line and not line.startswith("\u2500")]


def test_the_operators_lines_queue_the_bad_file_again(ran: Service) -> None:
    num_jobs = len(ran.jobs())
    done = run(ran, blocks("sh")[1])
    assert "node-07.csv is back in" in done.stdout
    ran.wait_for_state("node-07.csv", "quarantined")
    assert len(ran.jobs()) >= num_jobs


def test_the_variables_of_the_makefile_are_those_that_the_readme_names() -> None:
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    for variable in ("PYTHON", "TORCH"):
        assert re.search(rf"^{variable} \?=", makefile, re.MULTILINE)
        assert f"make {variable}=" in README
