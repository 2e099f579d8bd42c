"""`retraind score FILE...`: what is wrong in files of telemetry, by a published model. Trains and publishes nothing.

Owns how scored rows are written down: CSV or JSON lines, to standard output or to a file that is whole or not there.
"""

import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from retraind.commands import screen
from retraind.config import Config
from retraind.errors import HostError

if TYPE_CHECKING:
    from retraind.worker.scoring import ScoredRow

NAMED = (1, 2, 3)
HEADER = (
    "file", "line", "time", "score", "is_anomaly", "reason",
    *(name for number in NAMED for name in (f"error_metric_{number}", f"error_share_{number}")),
    *(name for number in NAMED for name in (f"z_metric_{number}", f"z_score_{number}")),
)  # fmt: skip
Write = Callable[["Iterable[ScoredRow]"], None]


def score(config: Config, files: list[Path], model: Path | None, out: Path | None, kind: str) -> int:
    """Scores the files in order; 0, whatever is found. Raises what reading and loading raise."""
    try:
        from retraind.worker.detector import load_model  # noqa: PLC0415  (they need numpy, pandas and torch)
        from retraind.worker.readers.source import Source  # noqa: PLC0415
        from retraind.worker.scoring import ScoredFile  # noqa: PLC0415
    except ImportError as error:
        raise HostError(
            "no_torch",
            f"{sys.executable} can not score: {error}",
            remedy="install torch, numpy and pandas for this interpreter",
        ) from error
    detector = load_model(model or config.models.dir / config.models.name)
    to_screen = out is None or out == Path("-")
    with (
        _opened(None if to_screen else out) as file,
        screen.ReadProgress("scoring", quiet=to_screen and sys.stdout.isatty()) as progress,
    ):
        write = _writer(file, kind)
        for index, path in enumerate(files):

            def beat(share: float | None, index: int = index) -> None:
                progress.beat(None if share is None else (index + share) / len(files))

            with Source(path, config.data, beat) as source:
                scored = ScoredFile(source, detector, config.data)
                account = _Account()
                for block in scored:
                    write(block)
                    account.add(block)
            screen.complain(f"{source.name}: {account.told(scored.unused)}")
    return 0


class _Account:
    """What is told of a file at its end."""

    def __init__(self) -> None:
        self._num_rows = self._num_anomalies = self._num_unusable = 0

    def add(self, rows: "list[ScoredRow]") -> None:
        self._num_rows += len(rows)
        self._num_anomalies += sum(row.is_anomaly is True for row in rows)
        self._num_unusable += sum(row.score is None for row in rows)

    def told(self, unused: list[str]) -> str:
        parts = [f"{self._num_rows:,} rows", f"{self._num_anomalies:,} above 1"]
        parts += [f"{self._num_unusable:,} not usable"] * (self._num_unusable > 0)
        parts += [f"ignored: {', '.join(unused)}"] * bool(unused)
        return ", ".join(parts)


def _writer(file: IO[str], kind: str) -> Write:
    """Writes a block of rows. CSV has a heading."""
    if kind == "jsonl":
        encode = msgspec.json.Encoder().encode
        return lambda rows: file.writelines(encode(row).decode() + "\n" for row in rows)
    table = csv.writer(file, lineterminator="\n")
    table.writerow(HEADER)
    return lambda rows: table.writerows(map(_cells, rows))


def _cells(row: "ScoredRow") -> list[object]:
    head = [row.file, row.line, row.time, row.score, row.is_anomaly, row.reason]
    if row.is_anomaly is not None:
        head[4] = "true" if row.is_anomaly else "false"
    gap = [""] * (2 * (len(NAMED) - len(row.by_error)))
    by_error = [cell for named in row.by_error for cell in (named.metric, named.share)]
    by_z = [cell for named in row.by_z for cell in (named.metric, named.z)]
    return [*head, *by_error, *gap, *by_z, *gap]


@contextmanager
def _opened(path: Path | None) -> Iterator[IO[str]]:
    """Standard output, or a file that appears under its name once it is complete: no reader takes a half for a whole.

    Not synced: it can be made again. What is no plain file (a FIFO, /dev/null) is written as it is.
    """
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    path = path.resolve()  # a link stays one
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
