"""`retraind models show` for people: one version, in the order and the words of its page.

Owns the order on a terminal and how much of long tables is shown; `--json` has all of it. Reads one more manifest, of
the version that was live before. Changes nothing, raises nothing.
"""

from pathlib import Path

from retraind.commands import screen
from retraind.report import Manifest
from retraind.supervisor import account, versions
from retraind.supervisor.page import PAGE_NAME

_SHOWN = 10  # rows of a long table
_MARKS = {account.BETTER: "+", account.WORSE: "-", account.OPEN: "?"}


def show(manifest: Manifest, directory: Path, mark: str) -> None:
    """Prints what is known of the version in `directory`; `mark` says that it is live or pinned."""
    screen.print_line(account.headline(manifest))
    for kind, sentence in account.verdicts(manifest):
        screen.print_line(f"{_MARKS[kind]} {sentence}")
    screen.print_heading("Version")
    screen.print_facts([*_places(manifest, directory, mark), *account.identity(manifest)[1:]])
    screen.print_heading("Mean errors, lower is better")
    screen.print_facts(account.errors(manifest))
    _worst_rows(manifest)
    _metric_errors(manifest)
    _comparison(manifest, directory)
    screen.print_heading("Gate")
    _table(("CRITERION", "STATUS", "FOUND"), account.criteria(manifest), account.NO_GATE)
    screen.print_heading("Data")
    screen.print_facts(account.data(manifest))
    screen.print_heading("Training")
    screen.print_facts(account.training(manifest))
    screen.print_heading("Preflight")
    _table(("CHECK", "STATUS", "FOUND"), account.checks(manifest), account.NO_CHECKS)
    screen.print_facts(account.gpus(manifest))


def _places(manifest: Manifest, directory: Path, mark: str) -> account.Pairs:
    page = directory / PAGE_NAME
    return [
        ("version", manifest.version + (f" ({mark})" if mark else "")),
        ("path", str(directory)),
        ("page", str(page) if page.is_file() else "none"),
        ("signature", "manifest.json.sig" if versions.is_signed(directory) else "none"),
    ]


def _table(heads: tuple[str, ...], rows: list[tuple[str, str, str]], otherwise: str) -> None:
    if rows:
        screen.print_table(heads, rows)
    else:
        screen.print_line(otherwise)


def _say_rest(num_rows: int) -> None:
    if num_rows > _SHOWN:
        screen.print_line(f"and {num_rows - _SHOWN:,} more: see the page, or --json")


def _worst_rows(manifest: Manifest) -> None:
    screen.print_heading("Rows that stand out")
    rows = account.worst_rows(manifest)
    cells = [(f"{row.row:,}", account.number(row.score), ", ".join(account.blame(row))) for row in rows[:_SHOWN]]
    _table(("ROW", "SCORE", "METRICS"), cells, account.NO_ROWS)
    _say_rest(len(rows))


def _metric_errors(manifest: Manifest) -> None:
    screen.print_heading("Error of each metric, the worst first")
    found = account.metric_errors(manifest)
    if found:
        screen.print_table(("METRIC", "ERROR"), [(name, account.number(error)) for name, error in found[:_SHOWN]])
        _say_rest(len(found))
    else:
        screen.print_line(account.NO_METRIC_ERRORS)


def _comparison(manifest: Manifest, directory: Path) -> None:
    if not manifest.replaces:
        return
    screen.print_heading("Compared with the version before")
    before = versions.read_manifest(directory.parent / manifest.replaces)
    if before is None:
        screen.print_line(f"{manifest.replaces} is no longer there.")
    else:
        screen.print_table(("", "THIS VERSION", "BEFORE"), account.beside(manifest, before))
        screen.print_line(account.other_metrics(manifest, before))
