"""Linters, types and the house's own measures, as tests: what they find fails the suite."""

import ast
import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKED = ("daemon", "tests", "benchmarks", "docs/man")
# Held to strict types. Tests are not: a test's arguments are fixtures and rows of a table, told by the name.
TYPED = ("daemon", "benchmarks", "docs/man", "tests/fakes")
MAX_MODULE_LINES = 350
MAX_FILE_BYTES = 1_000_000


def _missing(what: str) -> None:
    """A person's machine may lack a tool, the one that guards the branch may not."""
    if os.environ.get("CI"):
        pytest.fail(f"{what}, and CI is set")
    pytest.skip(what)


def _run(tool: str, *arguments: str) -> None:
    if importlib.util.find_spec(tool) is None:
        _missing(f"{tool} is not installed: pip install --editable '.[test]'")
    done = subprocess.run(
        [sys.executable, "-m", tool, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{tool} {' '.join(arguments)}\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing() -> None:
    _run("ruff", "check", "--no-cache", *CHECKED)


def test_the_code_is_formatted() -> None:
    _run("ruff", "format", "--check", "--no-cache", *CHECKED)


def test_the_types_hold() -> None:
    _run("mypy", *TYPED)


@cache
def _tracked() -> list[Path]:
    """The files that git knows and that are still there."""
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        _missing(f"the files can not be listed by git: {error}")
    paths = [ROOT / os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def test_every_module_says_what_it_is_for() -> None:
    modules = [path for path in _tracked() if path.suffix == ".py"]
    assert modules
    silent = [str(path.relative_to(ROOT)) for path in modules if not ast.get_docstring(ast.parse(path.read_bytes()))]
    assert silent == []


def test_a_module_of_the_daemon_can_be_held_in_mind() -> None:
    modules = sorted((ROOT / "daemon").rglob("*.py"))
    lengths = {str(path.relative_to(ROOT)): len(path.read_bytes().splitlines()) for path in modules}
    assert lengths
    assert {name: length for name, length in lengths.items() if length > MAX_MODULE_LINES} == {}


def test_the_repository_holds_no_large_file() -> None:
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in _tracked()}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_BYTES} == {}
