"""The published model beside the candidate: what the net of each leaves of the same held-out rows, in the same units.

Owns the figure by which the gate compares two models, and the words for why it could not be had. The losses of two
models are in the units of two scalers and can not be set against each other: here both count in deviations of the
candidate's, and far beyond them only with their logarithm, so that one burst does not decide. A published version that
is damaged, or of other metrics, never fails a job. Never decides. Raises what its beat and the rows raise.
"""

# B rows of a block, D metrics
# ruff: noqa: N803, N806  (arrays carry their shape)

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retraind import report
from retraind.errors import HostError
from retraind.worker.detector import Detector, load_model
from retraind.worker.rows import RowRange, last_rows, read_blocks
from retraind.worker.scaler import harden, soften
from retraind.worker.scorer import Scorer

# An error of so many rows is known to two digits, which is more than two seeds of one model agree on.
MAX_COMPARED_ROWS = 65_536

Beat = Callable[[float | None], None]
Floats = NDArray[np.float64]


def compare(
    home: Path, candidate: Scorer, dataset: report.Dataset, scaler: report.Scaler, rows: RowRange | None, beat: Beat
) -> tuple[report.Comparison | None, str]:
    """The comparison with the live version below `home`, on the last of the held-out rows; else None and why not."""
    if not (home / "current").is_symlink():
        return None, "nothing was published before"
    if rows is None:
        return None, "no rows are held out"
    try:
        published = load_model(home)
    except (HostError, OSError, RuntimeError) as error:
        return None, f"the published version can not be used: {error}"
    if others := sorted(inputs(published.manifest.dataset) ^ _inputs(dataset)):
        named = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        return None, f"version {published.version} is of other metrics: {named}"
    ours, theirs = _errors(published, candidate, dataset, scaler, last_rows(rows, MAX_COMPARED_ROWS), beat)
    return report.Comparison(
        version=published.version,
        published_error=theirs,
        candidate_error=ours,
        num_rows=min(rows.num_rows, MAX_COMPARED_ROWS),
    ), ""


def inputs(dataset: report.Dataset) -> set[str]:
    """The metrics; a counter's rate is another one than its value."""
    rates = set(dataset.rate_metrics)
    return {f"{name} per second" if name in rates else name for name in dataset.metric_names}


def _errors(
    published: Detector, candidate: Scorer, dataset: report.Dataset, scaler: report.Scaler, rows: RowRange, beat: Beat
) -> tuple[float, float]:
    """Mean squares of the candidate's and of the published net. A metric without deviations has no unit to count in."""
    order = [dataset.metric_names.index(name) for name in published.metric_names]
    is_counted_D = ~np.isin(dataset.metric_names, dataset.constant_metrics)
    scale_D = np.asarray(scaler.scale)
    squares, number = np.zeros(2), 0
    before_BD: Floats | None = None
    for block_BF in read_blocks(rows.seen_through(candidate.reach)):
        ours_BD = candidate.newest_residual(block_BF, has_missing=rows.has_missing).cpu().numpy()
        raw_BD = _raw(block_BF[:, -rows.num_metrics :].numpy(), scaler)
        theirs_BD = np.empty(raw_BD.shape, np.float32)
        theirs_BD[:, order] = published.residuals(raw_BD[:, order], before_BD) / scale_D[order]
        before_BD = raw_BD[-published.reach :][:, order]
        is_counted_BD = np.isfinite(raw_BD) & is_counted_D
        for index, residual_BD in enumerate((ours_BD, theirs_BD)):
            squares[index] += np.square(soften(residual_BD[is_counted_BD]), dtype=np.float64).sum()
        number += int(is_counted_BD.sum())
        beat(None)
    ours, theirs = (squares / max(number, 1)).tolist()
    return ours, theirs


def _raw(scaled_BD: NDArray[np.float32], scaler: report.Scaler) -> Floats:
    """The values that were scaled, as far as float32 has kept them."""
    raw_BD: Floats = harden(scaled_BD.astype(np.float64), scaler.soft_limit) * np.asarray(scaler.scale)
    raw_BD += np.asarray(scaler.centre)
    return raw_BD
