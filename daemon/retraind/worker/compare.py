"""The published model on new data: beside the candidate, in the same units, and how often its threshold is passed.

Owns the figure by which the gate compares two models, the count that tells drift, and the words for why they could not
be had. The losses of two
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
from retraind.worker.rows import MAX_HELDOUT_ROWS, RowRange, after_last_break, last_rows, read_blocks, spread_rows
from retraind.worker.scaler import harden, soften
from retraind.worker.scorer import Scorer

# An error of so many rows is known to two digits, which is more than two seeds of one model agree on.
MAX_COMPARED_ROWS = 65_536

Beat = Callable[[float | None], None]
Floats = NDArray[np.float64]
Found = tuple[report.Comparison | None, report.Drift | None, str]


def compare(
    home: Path,
    candidate: Scorer,
    dataset: report.Dataset,
    scaler: report.Scaler,
    rows: RowRange,
    heldout_rows: RowRange | None,
    beat: Beat,
) -> Found:
    """The live version below `home`: compared on the last of the held-out rows, and its alarms in all rows.

    What could not be had is None, and then there are words for why there is no comparison.
    """
    if not (home / "current").is_symlink():
        return None, None, "nothing was published before"
    try:
        published = load_model(home)
    except (HostError, OSError, RuntimeError) as error:
        return None, None, f"the published version can not be used: {error}"
    if others := sorted(inputs(published.manifest.dataset) ^ inputs(dataset)):
        named = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        return None, None, f"version {published.version} is of other metrics: {named}"
    drift = _drift(published, dataset, scaler, rows, beat)
    if heldout_rows is None:
        return None, drift, "no rows are held out"
    compared_rows = last_rows(after_last_break(heldout_rows), MAX_COMPARED_ROWS)
    ours, theirs = _errors(published, candidate, dataset, scaler, compared_rows, beat)
    comparison = report.Comparison(
        version=published.version,
        published_error=theirs,
        candidate_error=ours,
        num_rows=compared_rows.num_rows,
    )
    return comparison, drift, ""


def _drift(
    published: Detector, dataset: report.Dataset, scaler: report.Scaler, rows: RowRange, beat: Beat
) -> report.Drift | None:
    """How many of the rows, or of a sample in pieces that are spread over them, the published model calls anomalous."""
    threshold = published.manifest.evaluation.threshold
    if threshold is None:
        return None
    order = [dataset.metric_names.index(name) for name in published.metric_names]
    num_metrics, num_rows, num_alarms = rows.num_metrics, 0, 0
    for block_BF in spread_rows(rows.seen_through(published.reach), MAX_HELDOUT_ROWS):
        windows_BF = block_BF.numpy()
        before_RD = _raw(windows_BF[0, :-num_metrics].reshape(-1, num_metrics), scaler)
        raw_BD = _raw(windows_BF[:, -num_metrics:], scaler)
        scores_B = published.score(raw_BD[:, order], before_RD[:, order])
        num_rows += int(np.isfinite(scores_B).sum())
        num_alarms += int((scores_B > 1).sum())
        beat(None)
    return report.Drift(
        version=published.version, num_rows=num_rows, num_alarms=num_alarms, expected_share=threshold.expected_share
    )


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
