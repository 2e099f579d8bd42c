"""Which columns of a file are metrics: a decision from a sample, made once and the same for the whole file.

Owns the rules on names. The operator's word comes first: a kind in data.schema, then data.exclude. Then a column is a
metric if its name is no time's and no label's, data.include does not leave it out, and more than half of its sampled
cells that are not missing are numbers: less would be text, and with more the other cells are errors that must be
counted. Raises DataError ambiguous_columns, missing_columns, too_many_columns, no_numeric. Reads nothing itself.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from retraind.config import ColumnKind, DataConfig
from retraind.errors import DataError
from retraind.printable import printable
from retraind.report import IgnoredColumn

# Rows that decide what a column is. A report's worth of time for most producers, and read in milliseconds.
SAMPLE_ROWS = 1000
TIME_NAMES = frozenset(
    {"time", "timestamp", "ts", "epoch", "date", "datetime", "timestamp_ms", "epoch_ms", "unixtime", "unix_time"}
)
LABEL_NAMES = frozenset({"anomaly", "changepoint", "label", "is_anomaly"})
# What is told of a column that the operator has given a kind.
REASON_OF_KIND: dict[ColumnKind, str] = {
    "metric": "", "counter": "", "time": "time", "identifier": "identity", "label": "label", "ignore": "excluded",
}  # fmt: skip
# All names travel in one event, up to twice (a constant metric is named again), and an event has at most 1 MiB.
MAX_NAMES_BYTES = 400_000
# Names in a message, and how much of each; the rest is counted.
MAX_NAMED = 5
MAX_NAME_LENGTH = 60


@dataclass(frozen=True)
class Column:
    """A column of a file: its name, and its kind in the sample.

    `number`, `text` or `empty`, and by what is known of a producer `time` or `identity`: it tells whose a row is.
    """

    name: str
    kind: str


def position_names(count: int) -> list[str]:
    """Names for columns that have none."""
    return [f"column_{index}" for index in range(count)]


def clean_names(names: Sequence[str]) -> list[str]:
    """Names without blanks around them, a name by position for an empty one."""
    return [printable(name.strip()) or f"column_{index}" for index, name in enumerate(names)]


def kind_of_column(num_numbers: int, num_others: int) -> str:
    """The rule for a metric: more than half of what is not missing."""
    if num_numbers + num_others == 0:
        return "empty"
    return "number" if num_numbers > num_others else "text"


def choose_metrics(columns: Sequence[Column], limits: DataConfig) -> tuple[list[str], list[IgnoredColumn]]:
    """The names of the metrics in the order of the file, and the other columns with the reason."""
    check_names([column.name for column in columns], limits)
    reasons = {column.name: _reason_to_ignore(column, limits) for column in columns}
    metric_names = [name for name, reason in reasons.items() if not reason]
    _check_asked(columns, metric_names, limits)
    if not metric_names:
        found = listed(f"{reason}: {name}" for name, reason in reasons.items())
        raise DataError(
            "no_numeric",
            f"none of the {len(columns)} columns is a metric: {found}",
            remedy="a metric is a column of numbers that is neither a time nor a label",
        )
    return metric_names, [IgnoredColumn(name=name, reason=reason) for name, reason in reasons.items() if reason]


def match_metrics(
    columns: Sequence[Column],
    metric_names: Sequence[str],
    limits: DataConfig,
    *,
    whose: str,
    remedy: str = "files that are read together, or by one model, need the same metrics",
) -> list[IgnoredColumn]:
    """Checks that a file has all metrics of a first one, or a model; what it has beside them is ignored, with why."""
    kinds = {column.name: column.kind for column in columns}
    check_names([column.name for column in columns], limits)
    wanted = set(metric_names)
    if missing := [name for name in metric_names if name not in kinds]:
        raise DataError(
            "missing_columns",
            f"{len(missing)} metrics of {whose} are missing: {listed(missing)}",
            remedy=remedy,
        )
    if texts := [name for name in metric_names if kinds[name] == "text"]:
        raise _text_for_metrics(texts, whose)
    others = [column for column in columns if column.name not in wanted]
    _check_places(metric_names, others, whose)
    return [IgnoredColumn(name=c.name, reason=_reason_to_ignore(c, limits) or "extra") for c in others]


def _check_places(metric_names: Sequence[str], others: Sequence[Column], whose: str) -> None:
    """Columns without names are known by their place alone: with one more, all of them may have moved."""
    numbers = {column.name for column in others if column.kind == "number"}
    places = set(position_names(len(metric_names) + len(others)))
    if numbers and places.issuperset([*metric_names, *numbers]):
        raise DataError(
            "ambiguous_columns",
            f"the columns have no names, and there are more of numbers than {whose} has: {listed(sorted(numbers))}",
            remedy="write a header with names, or the same columns",
        )


def time_column(names: Iterable[str], limits: DataConfig) -> str | None:
    """The column that says when a row was: the one that data.schema names, or the first by its name."""
    known = list(names)
    pinned = [name for name in known if limits.schema.get(name) == "time"]
    by_name = [name for name in known if name.casefold() in TIME_NAMES and name not in limits.schema]
    return next(iter(pinned + by_name), None)


def check_names(names: Sequence[str], limits: DataConfig) -> None:
    """Raises for too many columns, and for names that differ by case or blanks only."""
    if len(names) > limits.max_columns:
        raise DataError(
            "too_many_columns",
            f"{len(names):,} columns; {limits.max_columns:,} are allowed",
            remedy="split the columns over several files, or raise data.max_columns",
        )
    counts = Counter(name.casefold() for name in names)
    if repeated := [name for name in names if counts[name.casefold()] > 1]:
        raise DataError(
            "ambiguous_columns",
            f"columns share a name: {listed(repeated)}",
            column=names.index(repeated[0]) + 1,
            remedy="give each column a name of its own; case and blanks do not count",
        )
    if (size := sum(len(name.encode()) + 3 for name in names)) > MAX_NAMES_BYTES:
        raise DataError(
            "too_many_columns",
            f"the column names take {size:,} bytes; {MAX_NAMES_BYTES:,} are allowed",
            remedy="give the columns shorter names",
        )


def listed(names: Iterable[str]) -> str:
    """A few names for a message."""
    shown = [name if len(name) <= MAX_NAME_LENGTH else name[:MAX_NAME_LENGTH] + "..." for name in names]
    more = f" and {len(shown) - MAX_NAMED} more" if len(shown) > MAX_NAMED else ""
    return ", ".join(shown[:MAX_NAMED]) + more


def _reason_to_ignore(column: Column, limits: DataConfig) -> str:
    if kind := limits.schema.get(column.name):
        return REASON_OF_KIND[kind]
    if any(fnmatchcase(column.name, pattern) for pattern in limits.exclude):
        return "excluded"
    name = column.name.casefold()
    if name in LABEL_NAMES:
        return "label"
    if column.kind in {"time", "identity"} or (column.kind == "number" and name in TIME_NAMES):
        return "identity" if column.kind == "identity" else "time"
    if limits.include and not any(fnmatchcase(column.name, pattern) for pattern in limits.include):
        return "not_included"
    return {"number": "", "text": "not_numeric"}.get(column.kind, column.kind)


def _check_asked(columns: Sequence[Column], metric_names: list[str], limits: DataConfig) -> None:
    """Raises for metrics that the operator has named and the file has not."""
    pinned = [name for name, kind in limits.schema.items() if kind in {"metric", "counter"}]
    kinds = {column.name: column.kind for column in columns}
    missing = [name for name in pinned if name not in kinds]
    missing += [pattern for pattern in limits.include if not any(fnmatchcase(name, pattern) for name in metric_names)]
    if missing:
        raise DataError(
            "missing_columns",
            f"no metric of the file is one that data.schema or data.include asks for: {listed(missing)}",
            remedy="mend the producer, or the key; `retraind inspect` shows what each column is taken for",
        )
    if texts := [name for name in pinned if kinds[name] == "text"]:
        raise _text_for_metrics(texts, "data.schema")


def _text_for_metrics(names: list[str], whose: str) -> DataError:
    return DataError(
        "no_numeric", f"metrics of {whose} hold text: {listed(names)}", remedy="write numbers in those columns"
    )
