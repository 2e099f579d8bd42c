"""`retraind score FILE...`: what is wrong in files of telemetry, by a published model. Trains and publishes nothing.

Owns the order of the work and what is told of each file at its end; how rows are written down is score_output's.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from retraind.commands import screen
from retraind.commands.score_output import opened, writing
from retraind.config import Config
from retraind.errors import HostError, UsageError

if TYPE_CHECKING:
    from retraind.worker.scoring import ScoredRow


def score(config: Config, files: list[Path], model: Path | None, out: Path | None, kind: str) -> int:
    """Scores the files in order; 0, whatever is found. Raises what reading and loading raise, and UsageError."""
    to_screen = out is None or out == Path("-")
    if kind == "parquet" and to_screen and sys.stdout.isatty():
        raise UsageError("bad_argument", "Parquet is not for a terminal", remedy="name a file with --out")
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
    with (
        opened(None if to_screen else out) as file,
        writing(file, kind) as write,
        screen.ReadProgress("scoring", quiet=to_screen and sys.stdout.isatty()) as progress,
    ):
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
