"""From dataset files to scaled float32 rows on disk, with an account of what was used and what was not.

Owns the single pass: read, count, hash, moments and cache. Never trains, and never writes but its cache. Memory is
bounded by what a reader holds, whatever the files' size: a block, or what its format needs up to a bound of its own.
Raises IntakeError, DataError, DatasetChanged, HostError, and Interrupted through `beat`. The cache is no durable file:
after a power cut it is made anew.
"""

# N rows of a block, D metrics
# ruff: noqa: N803, N806  (arrays carry their shape)

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retraind.column_rules import ColumnRules, HeldTo, rules_of
from retraind.config import DataConfig
from retraind.errors import DataError, HostError
from retraind.report import MAX_MOST_MISSING, MAX_PROBLEMS, Dataset, IgnoredColumn, MissingCells, Problem, Scaler
from retraind.worker.rates import Rates, counters_of
from retraind.worker.readers import HOW_TO_COLLECT, open_reader
from retraind.worker.readers.columns import Column, choose_metrics, listed, match_metrics, time_column
from retraind.worker.readers.rowtimes import TimedTally
from retraind.worker.readers.source import RAW_BYTES, Beat, Source, open_regular
from retraind.worker.readers.tally import REASONS, Tally
from retraind.worker.rowcache import RowCache, RowCacheWriter
from retraind.worker.scaler import Moments, moments_of

CACHE_NAME = "rows.f32"


@dataclass(frozen=True)
class Ingested:
    """A dataset that is ready to be trained on."""

    dataset: Dataset
    scaler: Scaler
    rows: RowCache


@dataclass
class _Account:
    """What is known of the files read so far. `breaks` are the rows with which a later file begins."""

    rules: ColumnRules
    held_to: HeldTo | None = None
    breaks: list[int] = field(default_factory=list)
    rates: Rates | None = None
    names: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    num_bytes: int = 0
    metric_names: list[str] = field(default_factory=list)
    ignored: list[IgnoredColumn] = field(default_factory=list)
    num_dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    problems: list[Problem] = field(default_factory=list)
    num_non_finite_cells: int = 0
    moments: Moments = field(default_factory=lambda: Moments.of_nothing(0))

    def add_tally(self, tally: Tally) -> None:
        for reason, number in tally.num_dropped.items():
            self.num_dropped[reason] += number
        self.problems = [*self.problems, *tally.problems][:MAX_PROBLEMS]
        self.num_non_finite_cells += tally.num_non_finite_cells

    @property
    def num_missing_cells(self) -> int:
        return int(self.moments.num_missing_D.sum())

    def most_missing(self) -> list[MissingCells]:
        """The metrics that lack most, the worst first."""
        missing_D = self.moments.num_missing_D
        worst = np.argsort(-missing_D, kind="stable")[:MAX_MOST_MISSING].tolist()
        return [
            MissingCells(name=self.metric_names[index], num_cells=int(missing_D[index]))
            for index in worst
            if missing_D[index]
        ]

    def dataset(self) -> Dataset:
        constant = zip(self.metric_names, self.moments.is_constant_D, strict=True)
        return Dataset(
            name=", ".join(self.names),
            sha256=_sha256_of_digests(self.digests),
            num_bytes=self.num_bytes,
            format=", ".join(dict.fromkeys(self.formats)),
            num_rows=self.moments.num_rows,
            num_dropped=self.num_dropped,
            metric_names=self.metric_names,
            ignored_columns=self.ignored,
            constant_metrics=[name for name, is_constant in constant if is_constant],
            problems=self.problems,
            num_missing_cells=self.num_missing_cells,
            num_non_finite_cells=self.num_non_finite_cells,
            most_missing=self.most_missing(),
            rules=self.rules,
            rate_metrics=self.rates.names if self.rates else [],
            held_to=self.held_to.version if self.held_to else "",
        )


def ingest(
    paths: Sequence[Path], work_dir: Path, limits: DataConfig, beat: Beat, held_to: HeldTo | None = None
) -> Ingested:
    """Reads `paths` as one dataset and leaves its scaled rows as rows.f32 in `work_dir`.

    A path is a file, or a directory that holds one file. Columns of later files are matched by name to the first's, and
    the first's to the list that it is held to, if there is one.
    `beat` gets the share of the input that is done at least once a block and may raise. On an error no cache is left.
    """
    with host_errors(work_dir), RowCacheWriter(work_dir / CACHE_NAME) as writer:
        account = _read(paths, limits, beat, writer.append, work_dir, held_to)
        scaler = account.moments.scaler()
        rows = replace(writer.finish(account.moments, beat), breaks=tuple(account.breaks))
    return Ingested(account.dataset(), scaler, rows)


def describe(
    paths: Sequence[Path], limits: DataConfig, beat: Beat = lambda _: None, held_to: HeldTo | None = None
) -> tuple[Dataset, Scaler]:
    """What `ingest` would make of the files, by the same reading and with the same errors, without a cache."""
    account = _read(paths, limits, beat, lambda _rows, _moments: None, None, held_to)
    return account.dataset(), account.moments.scaler()


def _read(
    paths: Sequence[Path],
    limits: DataConfig,
    beat: Beat,
    append: Callable[[NDArray[np.float64], Moments], None],
    spill_dir: Path | None,
    held_to: HeldTo | None,
) -> _Account:
    """Reads all files; `append` gets each block of rows with the moments of all rows up to and with it."""
    account = _Account(rules_of(limits), held_to)
    if held_to is not None:
        account.metric_names = list(held_to.metric_names)
    for index, path in enumerate(paths):

        def beat_of_all(share: float | None, index: int = index) -> None:
            beat(None if share is None else (index + share) / len(paths))

        num_before = account.moments.num_rows
        with Source(path, limits, beat_of_all) as source, _file_named(source.name, len(paths)):
            _read_file(source, limits, account, append, spill_dir)
        if 0 < num_before < account.moments.num_rows:
            account.breaks.append(num_before)
    _check_rows(account, limits)
    return account


def _read_file(
    source: Source,
    limits: DataConfig,
    account: _Account,
    append: Callable[[NDArray[np.float64], Moments], None],
    spill_dir: Path | None,
) -> None:
    reader = open_reader(source, limits, spill_dir)
    if account.metric_names:
        known = {column.name for column in account.ignored}
        others = _match(reader.columns, account, limits)
        account.ignored += [column for column in others if column.name not in known]
    else:
        account.metric_names, account.ignored = choose_metrics(reader.columns, limits)
    if account.rates is None:
        counters, perhaps = counters_of(account.metric_names, limits)
        if account.held_to:
            counters, perhaps = account.held_to.rate_metrics, []
        account.rates = Rates(account.metric_names, counters, perhaps)
    beside = [column.name for column in reader.columns if column.name not in account.metric_names]
    tally = TimedTally(time_column(beside, limits)) if account.rates.names else Tally()
    for read_ND in reader.rows(account.metric_names, tally):
        rows_ND = _as_rates(read_ND, tally, account.rates) if isinstance(tally, TimedTally) else read_ND
        account.moments = account.moments.merged(moments_of(rows_ND))
        append(rows_ND, account.moments)
    source.finish()
    account.names.append(source.name)
    account.digests.append(source.sha256)
    account.formats.append(reader.format + (f"+{source.compression}" if source.compression else ""))
    account.num_bytes += source.num_bytes
    account.add_tally(tally)


def _as_rates(read_ND: NDArray[np.float64], tally: TimedTally, rates: Rates) -> NDArray[np.float64]:
    """A row in which nothing has a value then, as the first one of counters alone, is dropped."""
    lines, seconds_N = tally.take()
    rows_ND = rates.of(read_ND, seconds_N)
    is_lost_N = np.isnan(rows_ND).all(axis=1)
    for row in np.flatnonzero(is_lost_N).tolist():
        tally.drop("missing", lines[row], text="counters without a value before")
    return rows_ND[~is_lost_N]


def _match(columns: Sequence[Column], account: _Account, limits: DataConfig) -> list[IgnoredColumn]:
    if not account.held_to:
        return match_metrics(columns, account.metric_names, limits, whose="the first file")
    return match_metrics(
        columns,
        account.metric_names,
        limits,
        whose=f"the published version {account.held_to.version}",
        remedy="mend the producer, or set data.metrics: own if the model is to have the metrics of its file",
    )


def _check_rows(account: _Account, limits: DataConfig) -> None:
    """Raises DataError when too many rows are bad, too few are left, or too much is missing in those."""
    num_used, num_dropped = account.moments.num_rows, sum(account.num_dropped.values())
    counts = ", ".join(f"{count:,} {reason}" for reason, count in account.num_dropped.items() if count)
    if num_used + num_dropped == 0:
        raise DataError("no_rows", "the dataset has no rows", remedy="write rows of numbers below the header")
    if num_dropped > limits.max_bad_share * (num_used + num_dropped):
        first = account.problems[0]
        raise DataError(
            "too_many_bad_rows",
            f"{num_dropped:,} of {num_used + num_dropped:,} rows can not be used ({counts}); "
            f"first: {first.reason} {first.text!r}",
            line=first.line,
            column=first.column,
            remedy="mend the file, or raise data.max_bad_share",
        )
    if num_used < limits.min_rows:
        dropped = f" beside {num_dropped:,} that can not be used ({counts})" if num_dropped else ""
        raise DataError(
            "too_few_rows",
            f"the dataset has {num_used:,} rows{dropped}; {limits.min_rows:,} are needed",
            remedy=_how_to_collect(account),
        )
    num_missing, num_cells = account.num_missing_cells, num_used * len(account.metric_names)
    if num_missing > limits.max_missing_share * num_cells:
        worst = listed(f"{found.name} {found.num_cells / num_used:.0%}" for found in account.most_missing())
        raise DataError(
            "too_many_missing",
            f"{num_missing:,} of {num_cells:,} cells are missing in the {num_used:,} rows that can be used; "
            f"most are of: {worst}",
            remedy="leave out the columns that have no values, or raise data.max_missing_share",
        )


def _how_to_collect(account: _Account) -> str:
    format_ = account.formats[0].partition("+")[0]
    return HOW_TO_COLLECT.get(format_, "collect for longer, or lower data.min_rows")


@contextmanager
def _file_named(name: str, num_files: int) -> Iterator[None]:
    """Names the file in an error, where there is more than one."""
    try:
        yield
    except DataError as error:
        if num_files == 1:
            raise
        raise error.within(name) from error


@contextmanager
def host_errors(place: Path) -> Iterator[None]:
    """Gives errors of writing in `place` their names: HostError disk_full or host_io."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise HostError(
                "disk_full", f"no space left in {place}: {error.strerror}", remedy="free space below state.dir"
            ) from error
        raise HostError(
            "host_io", f"{place} can not be used: {error.strerror}", remedy="look into the kernel's log"
        ) from error


def _sha256_of_digests(digests: list[str]) -> str:
    """Of several files: the digest of their digests, a line each, in the order of reading."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def sha256_of_dataset(paths: Sequence[Path], beat: Beat) -> str:
    """The sha256 that a dataset has in its report, also where its content can not be used.

    Reads all of it again, which for a large file takes minutes: `beat` is called all the while and may raise.
    """
    digests = []
    for path in paths:
        digest = hashlib.sha256()
        fd, _ = open_regular(path)
        with os.fdopen(fd, "rb", buffering=0) as file:
            while block := file.read(RAW_BYTES):
                digest.update(block)
                beat(None)
        digests.append(digest.hexdigest())
    return _sha256_of_digests(digests)
