"""The log of several GPUs by nvidia-smi to rows: the records of one time are one row, `NAME{index="0"}` a column.

Owns how such a log is known: by nvidia-smi's names in the header, a `timestamp`, and a column that tells the GPUs apart
(index, uuid, bus or serial; never the name alone, which two may share) with several values in the first lines. A log of
one GPU is a plain table, as `delimited` reads it. nvidia-smi stamps each GPU by itself: stamps less than half a step
apart are one row, as in all series. Raises DataError malformed, no_rows, and what `samples` and `pivot` raise.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.readers.lines import numbered_lines
from retraind.worker.readers.numbers import reason_against, split_unit
from retraind.worker.readers.pivot import SeriesReader
from retraind.worker.readers.producers import NVIDIA_IDENTITIES, NVIDIA_NAME
from retraind.worker.readers.samples import Samples, series_name
from retraind.worker.readers.source import Source
from retraind.worker.readers.timestamps import Clock

BLOCK_BYTES = 2**20
TIME = "timestamp"
# Of the columns that tell whose a record is, those that no two GPUs of a machine share.
UNIQUE = tuple(name for name in NVIDIA_IDENTITIES if name not in {"name", "gpu_name"})
DATE = re.compile(r"([0-9]{4})/([0-9]{2})/([0-9]{2})( .*)")
REMEDY = "log again, or each GPU into a file of its own: nvidia-smi -i 0 --query-gpu=... --format=csv -l 1"


@dataclass(frozen=True)
class Layout:
    """The columns of a log, and which of them tell time and GPU."""

    names: list[str]
    time: int
    gpu: int

    @property
    def metrics(self) -> list[int]:
        return [i for i, name in enumerate(self.names) if i != self.time and name not in NVIDIA_IDENTITIES]


def layout_of(lines: Sequence[str]) -> Layout | None:
    """The layout of a log of several GPUs that begins with these lines; None for anything else."""
    names = _cells(lines[0])
    gpu = next((names.index(name) for name in UNIQUE if name in names), None)
    if gpu is None or TIME not in names or not any(NVIDIA_NAME.fullmatch(name) for name in names):
        return None
    records = [cells for cells in map(_cells, lines[1:]) if len(cells) == len(names) and cells != names]
    if len({cells[gpu] for cells in records}) < 2 or len(set(names)) < len(names):
        return None
    return Layout(names, names.index(TIME), gpu)


def read_gpus(source: Source, limits: DataConfig, layout: Layout) -> SeriesReader:
    """Reads all of it: which GPUs there are is known at the end."""
    samples, clock = Samples(limits), Clock()
    units: dict[int, str] = {}
    for cells, line in _records(source, limits, layout):
        try:
            instant = clock.instant(DATE.sub(r"\1-\2-\3\4", cells[layout.time]))
        except ValueError as error:
            raise DataError("malformed", str(error), line=line, column=layout.time + 1, remedy=REMEDY) from error
        if not cells[layout.gpu]:
            raise DataError("malformed", "the GPU has no name", line=line, column=layout.gpu + 1, remedy=REMEDY)
        labels = {layout.names[layout.gpu]: cells[layout.gpu]}
        for column in layout.metrics:
            name = series_name(layout.names[column], labels)
            number, unit = split_unit(cells[column])
            reason = reason_against(number)
            if reason == "not_a_number":
                samples.add_text(name, line)
                continue
            if reason is None and units.setdefault(column, unit) != unit:
                raise DataError(
                    "malformed",
                    f"{cells[column]!r:.40} has another unit than the cells before it",
                    line=line,
                    column=column + 1,
                    remedy=REMEDY,
                )
            value = float("nan") if reason == "missing" else float(number)
            samples.add(samples.code(name, line), instant, value, line)
    return SeriesReader("nvidia-smi", source, samples)


def _records(source: Source, limits: DataConfig, layout: Layout) -> Iterator[tuple[list[str], int]]:
    """The records below the header, which is passed over where it comes again; and so is a last one without its end."""
    for text, line, is_cut in numbered_lines(source, BLOCK_BYTES, limits.max_line_bytes):
        cells = _cells(text)
        if text and not is_cut and cells != layout.names:
            if len(cells) == len(layout.names):
                yield cells, line
                continue
            raise DataError(
                "malformed",
                f"the record has {len(cells):,} fields; {len(layout.names):,} are expected",
                line=line,
                remedy=REMEDY,
            )


def _cells(line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]
    except csv.Error:  # a field beyond what csv splits
        return [line]
