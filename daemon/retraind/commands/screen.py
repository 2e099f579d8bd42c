"""What the commands print: tables, progress, JSON. The only importer of rich.

JSON goes to standard output alone, so that a script can read it; progress and complaints go to standard error.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Self

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from retraind import events

# Piped output is for grep: as wide as it needs to be, never folded.
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 10_000)
err = Console(stderr=True, highlight=False, soft_wrap=True)

_STYLES = {
    "pass": "green", "published": "green", "live": "green", "warn": "yellow", "deferred": "yellow",
    "fail": "red bold", "quarantined": "red", "rejected": "red", "skip": "dim", "unknown": "dim", "duplicate": "dim",
}  # fmt: skip


def print_json(value: object) -> None:
    """A value as indented JSON on standard output."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Rows under headings; words like pass, fail or quarantined get their colour. Text is printed as it is."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell), style=_STYLES.get(str(cell), "")) for cell in row))
    out.print(table, crop=False)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Name and value a line, the names aligned."""
    pairs = [(name, str(value)) for name, value in facts]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        out.print(Text.assemble((f"{name:<{width}}  ", "bold"), value))


def print_heading(text: str) -> None:
    """A line above facts or a table, set off from what is before."""
    out.print()
    out.print(Text(text, style="bold underline"))


def print_line(text: str) -> None:
    """A line for people on standard output."""
    out.print(Text(text))


def complain(text: str) -> None:
    """A line for people on standard error."""
    err.print(Text(text))


class ReadProgress:
    """How far the reading of files is: a bar on a terminal, nothing elsewhere."""

    def __init__(self, name: str, *, quiet: bool = False) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=30), TaskProgressColumn(), TimeRemainingColumn(),
            console=err, transient=True, disable=quiet or not err.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(name, total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def beat(self, done_share: float | None) -> None:
        if done_share is not None:
            self._bar.update(self._task, completed=done_share)


class JobProgress:
    """A job's progress: a bar on a terminal, otherwise a line when the stage or the epoch changes."""

    def __init__(self, name: str, *, quiet: bool = False) -> None:
        self._name = name
        self._quiet = quiet
        self._said = ""
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[detail]}"),
            console=err, transient=True, disable=quiet or not err.is_terminal,
        )  # fmt: skip
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        self._task = self._bar.add_task(self._name, total=1.0, detail="starting")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, event: events.Event, text: str) -> None:
        """Takes every event of the worker; `text` is what `systemctl status` would say."""
        assert self._task is not None
        if self._quiet:
            return
        verb, _, detail = text.partition(f" {self._name}")
        if isinstance(event, events.Progress):
            self._bar.update(self._task, total=event.epochs, completed=event.epoch - 1)
        elif isinstance(event, events.Stage):
            self._bar.update(self._task, total=None, completed=0)
        elif isinstance(event, events.Heartbeat) and event.done_share is not None:
            self._bar.update(self._task, total=1.0, completed=event.done_share)
        self._bar.update(self._task, description=f"{verb} {self._name}", detail=detail.lstrip(": "))
        mark = f"{verb}{event.epoch}" if isinstance(event, events.Progress) else verb
        if mark != self._said and not err.is_terminal:
            self._said = mark
            complain(text)
