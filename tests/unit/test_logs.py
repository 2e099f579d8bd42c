"""Log lines as a terminal and the journal get them: whose they are, and that nothing can pass for another."""

import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from retraind import logs


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines_of(stream: io.StringIO) -> list[str]:
    """Without the time of day."""
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in stream.getvalue().split("\n")[:-1]]


def test_every_line_of_a_traceback_says_whose_job_it_is() -> None:
    stream = io.StringIO()
    logs.setup("info", job="J1", stream=stream)
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logging.getLogger("x").exception("crashed")
    lines = lines_of(stream)
    assert lines[0] == "error   job J1: crashed"
    assert lines[-2:] == ["error   job J1: ValueError: first", "error   job J1: second"]
    assert all(line.startswith("error   job J1: ") for line in lines)


@pytest.mark.parametrize("mark", ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_what_follows_a_line_break_is_set_in_and_can_not_pass_for_a_record(mark: str) -> None:
    stream = io.StringIO()
    logs.setup("info", stream=stream)
    logging.getLogger("x").info("took %s", f"a.csv{mark}job J2: published")
    assert lines_of(stream) == ["info    took a.csv", "info      job J2: published"]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("", ""),
        ("a\tb", "a       b"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\udcff.csv", "\\xff.csv"),
        ("M\u00fcller", "M\u00fcller"),
    ],
)
def test_what_is_not_printable_stands_as_an_escape(message: str, shown: str) -> None:
    stream = io.StringIO()
    logs.setup("info", stream=stream)
    logging.getLogger("x").info("%s", message)
    assert lines_of(stream) == [f"info    {shown}"]


def test_a_second_setup_takes_the_place_of_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.setup("info", stream=first)
    logs.setup("warning", stream=second)
    logging.getLogger("x").info("not shown")
    logging.getLogger("x").warning("shown")
    assert first.getvalue() == ""
    assert lines_of(second) == ["warning shown"]


@pytest.mark.parametrize("journal", ["", "1:2", "nonsense", "1:2:3"])
def test_another_processs_journal_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal: str) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", journal)
    with (tmp_path / "log").open("w") as stream:
        assert not logs.is_journal(stream)
    assert not logs.is_journal(io.StringIO()), "a stream without a descriptor"
    assert not logs.is_journal(stream), "a closed stream"


def test_a_process_whose_standard_error_is_the_journal_writes_priorities_and_no_time() -> None:
    read, write = os.pipe()
    info = os.fstat(write)
    code = "import logging; from retraind import logs; logs.setup('info', job='J1'); logging.warning('low\\ndisk')"
    with os.fdopen(write, "wb") as stream:
        subprocess.run(
            [sys.executable, "-c", code], stderr=stream, check=True, timeout=60,
            env={**os.environ, "JOURNAL_STREAM": f"{info.st_dev}:{info.st_ino}"},
        )  # fmt: skip
    with os.fdopen(read, "rb") as stream:
        assert stream.read() == b"<4>job J1: low\n<4>job J1:   disk\n"
