"""`retraind inspect FILE`: what training would use of a file. Trains nothing and needs no torch."""

from pathlib import Path

from retraind.commands import screen
from retraind.config import Config
from retraind.errors import RetraindError
from retraind.report import Dataset, Scaler
from retraind.supervisor import versions
from retraind.supervisor.publish import Publisher
from retraind.supervisor.schedule import reason_of
from retraind.worker import ingest


def inspect(config: Config, files: list[Path], *, as_json: bool) -> int:
    """Prints what was understood; 0, or the exit status of the error, 65 for a dataset that would be refused."""
    try:
        live = Publisher(config.models.dir, config.models.name).live()
        dataset, scaler = ingest.describe(files, config.data, held_to=versions.held_to(live, config.data))
    except RetraindError as error:
        if not as_json:
            raise
        reason = reason_of(error)
        screen.print_json({name: getattr(reason, name) for name in ("code", "message", "line", "column", "remedy")})
        return error.exit_status
    if as_json:
        screen.print_json(dataset)
    else:
        _print(dataset, scaler)
    return 0


def _missing(dataset: Dataset) -> str:
    if not dataset.num_missing_cells:
        return "none"
    infinite = f", {dataset.num_non_finite_cells:,} of them infinite" if dataset.num_non_finite_cells else ""
    most = ", ".join(f"{found.name} {found.num_cells:,}" for found in dataset.most_missing)
    return f"{dataset.num_missing_cells:,} of {dataset.num_rows * len(dataset.metric_names):,}{infinite}: {most}"


def _print(dataset: Dataset, scaler: Scaler) -> None:
    dropped = ", ".join(f"{count} {reason}" for reason, count in dataset.num_dropped.items() if count) or "none"
    screen.print_facts(
        [
            ("file", dataset.name),
            ("format", dataset.format),
            ("bytes", f"{dataset.num_bytes:,}"),
            ("sha256", dataset.sha256),
            ("rows used", f"{dataset.num_rows:,}"),
            ("rows dropped", dropped),
            ("cells missing", _missing(dataset)),
            ("metrics", f"{len(dataset.metric_names)}{', as version ' + dataset.held_to if dataset.held_to else ''}"),
            *[("rates per second", ", ".join(dataset.rate_metrics))] * bool(dataset.rate_metrics),
            ("ignored", ", ".join(f"{column.name} ({column.reason})" for column in dataset.ignored_columns) or "none"),
        ]
    )
    constant = set(dataset.constant_metrics)
    rows = zip(dataset.metric_names, scaler.centre, scaler.scale, strict=True)
    screen.print_line("")
    screen.print_table(
        ("METRIC", "CENTRE", "SCALE"),
        [(name, f"{centre:.6g}", "constant" if name in constant else f"{scale:.6g}") for name, centre, scale in rows],
    )
    if dataset.problems:
        screen.print_line("\nfirst rows that are not used:")
        screen.print_table(
            ("LINE", "COLUMN", "REASON", "TEXT"),
            [(bad.line, bad.column or "", bad.reason, bad.text) for bad in dataset.problems],
        )
