"""Scored rows written down: as CSV, JSON lines or Parquet, to standard output or to a file that is whole or not there.

Owns the columns, which CSV and Parquet share, and their types. Memory is bounded by a group of rows. Never scores.
Raises ReaderMissing no_reader where Parquet is asked for and this interpreter has no pyarrow, OSError unchanged.
"""

import csv
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from retraind.worker.scoring import ScoredRow

NAMED = (1, 2, 3)
HEADER = (
    "file", "line", "time", "score", "is_anomaly", "reason",
    *(name for number in NAMED for name in (f"error_metric_{number}", f"error_share_{number}")),
    *(name for number in NAMED for name in (f"z_metric_{number}", f"z_score_{number}")),
)  # fmt: skip
# A reader opens each group of a Parquet file by itself: small blocks, of wide files, are gathered to one of this size.
GROUP_ROWS = 65_536

Write = Callable[["Iterable[ScoredRow]"], None]


@contextmanager
def writing(file: IO[bytes], kind: str) -> Iterator[Write]:
    """Writes blocks of rows to an open file, which it leaves open; the file is complete at the end."""
    if kind == "parquet":
        table = _ParquetRows(file)
        yield table.write
        table.finish()
    elif kind == "jsonl":
        encode = msgspec.json.Encoder().encode
        yield lambda rows: file.writelines(encode(row) + b"\n" for row in rows)
    else:
        text = io.StringIO()
        cells = csv.writer(text, lineterminator="\n")
        cells.writerow(HEADER)

        def write(rows: "Iterable[ScoredRow]") -> None:
            cells.writerows(map(_csv_cells, rows))
            file.write(text.getvalue().encode())
            text.seek(0)
            text.truncate()

        write(())
        yield write


class _ParquetRows:
    """The columns of the CSV with their types, and a null where that has an empty cell."""

    def __init__(self, file: IO[bytes]) -> None:
        from retraind.worker.readers.arrowtable import library  # noqa: PLC0415  (it needs numpy)

        self._arrow = library(
            f"Parquet is written by pyarrow, and {sys.executable}",
            "install it from Debian where it has python3-pyarrow, or by pip install 'retraind[arrow]'; "
            "or choose --format csv or jsonl",
        )
        self._schema = self._arrow.schema([(name, self._type(name)) for name in HEADER])
        self._writer = self._arrow.parquet.ParquetWriter(file, self._schema)
        self._batches: list[Any] = []
        self._num_rows = 0

    def _type(self, name: str) -> Any:
        if name == "line":
            return self._arrow.int64()
        if name == "is_anomaly":
            return self._arrow.bool_()
        is_number = name.startswith(("score", "error_share", "z_score"))
        return self._arrow.float32() if is_number else self._arrow.string()

    def write(self, rows: "Iterable[ScoredRow]") -> None:
        columns = list(zip(*map(_cells, rows), strict=True))
        if not columns:
            return
        arrays = [self._arrow.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._batches.append(self._arrow.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._num_rows += len(columns[0])
        if self._num_rows >= GROUP_ROWS:
            self._write_group()

    def finish(self) -> None:
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._batches:
            self._writer.write_table(self._arrow.Table.from_batches(self._batches), row_group_size=self._num_rows)
        self._batches, self._num_rows = [], 0


def _cells(row: "ScoredRow") -> list[Any]:
    """In the order of HEADER, None for what is not there."""
    gap = [None] * (2 * (len(NAMED) - len(row.by_error)))
    by_error = [cell for named in row.by_error for cell in (named.metric, named.share)]
    by_z = [cell for named in row.by_z for cell in (named.metric, named.z)]
    head = [row.file, row.line, row.time or None, row.score, row.is_anomaly, row.reason or None]
    return [*head, *by_error, *gap, *by_z, *gap]


def _csv_cells(row: "ScoredRow") -> list[Any]:
    cells = _cells(row)
    if row.is_anomaly is not None:
        cells[HEADER.index("is_anomaly")] = "true" if row.is_anomaly else "false"
    return cells


@contextmanager
def opened(path: Path | None) -> Iterator[IO[bytes]]:
    """Standard output, or a file that appears under its name once it is complete: no reader takes a half for a whole.

    Not synced: it can be made again. What is no plain file (a FIFO, /dev/null) is written as it is.
    """
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    path = path.resolve()  # a link stays one
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
