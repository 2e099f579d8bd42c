"""A file to scored rows: read as for training, matched to a model by column name, one answer for each row of the file.

Owns what is said of a row: its score, whether that is an anomaly, and which metrics are to blame by two measures. The
net spreads one metric's fault over its neighbours, so the share of the error alone would mislead: the z-score says how
unusual a value is by itself. Memory is bounded by a block. Raises IntakeError, DataError, DatasetChanged, HostError.
"""

# N rows of a block, D metrics, K metrics that are named
# ruff: noqa: N803, N806  (arrays carry their shape)

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from retraind.config import DataConfig
from retraind.worker.detector import Detector
from retraind.worker.rates import Rates
from retraind.worker.readers import open_reader
from retraind.worker.readers.columns import match_metrics, time_column
from retraind.worker.readers.rowlog import Row, RowLog
from retraind.worker.readers.source import Source

# Metrics that are named for each row: most faults show in one or two.
NUM_NAMED = 3

Floats = NDArray[np.float32]


class Share(msgspec.Struct, frozen=True):
    """A metric and its share of the row's error, from 0 to 1."""

    metric: str
    share: float


class ZScore(msgspec.Struct, frozen=True):
    """A metric and how many standard deviations its value is from its mean."""

    metric: str
    z: float


class ScoredRow(msgspec.Struct, frozen=True):
    """One row of a file. Without a score there is a reason: a key of Dataset.num_dropped."""

    file: str
    line: int
    time: str
    score: float | None
    is_anomaly: bool | None
    reason: str
    by_error: list[Share]
    by_z: list[ZScore]


class ScoredFile:
    """Iterates over blocks of scored rows. Raises DataError missing_columns, when made, for a file that does not fit.

    `time_column` is the one whose text goes with each row, None where the file has none; `unused` are the others that
    the model does not take.
    """

    def __init__(self, source: Source, detector: Detector, limits: DataConfig) -> None:
        self._source = source
        self._detector = detector
        self._reader = open_reader(source, limits)
        extra = match_metrics(self._reader.columns, detector.metric_names, limits, whose="the model")
        names = [column.name for column in extra]
        self.time_column = time_column(names, limits)
        self.unused = [name for name in names if name != self.time_column]

    def __iter__(self) -> Iterator[list[ScoredRow]]:
        rate_metrics = self._detector.manifest.dataset.rate_metrics
        rates = Rates(self._detector.metric_names, rate_metrics)
        log = RowLog(self.time_column, is_timed=bool(rate_metrics))
        before_RD: NDArray[np.float64] | None = None
        for usable_ND in self._reader.rows(self._detector.metric_names, log):
            rows, rows_ND = log.take(usable_ND)
            if rate_metrics:
                rows_ND = rates.of(rows_ND, log.seconds(rows))
                for index in np.flatnonzero(np.isnan(rows_ND).all(axis=1)).tolist():
                    rows[index] = replace(rows[index], reason=rows[index].reason or "missing")
            yield self._scored(rows, rows_ND, before_RD)
            before_RD = rows_ND if before_RD is None else np.concatenate([before_RD, rows_ND])
            before_RD = before_RD[-self._detector.reach :]
        self._source.finish()

    def _scored(
        self, rows: list[Row], rows_ND: NDArray[np.float64], before_RD: NDArray[np.float64] | None
    ) -> list[ScoredRow]:
        errors_ND, z_ND = self._detector.explain(rows_ND, before_RD)
        scores_N = errors_ND.mean(axis=1) / self._detector.threshold
        shares_ND = errors_ND / np.maximum(errors_ND.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        is_there_ND = np.isfinite(z_ND)
        by_error = self._worst(shares_ND, shares_ND, is_there_ND)
        by_z = self._worst(np.abs(z_ND), z_ND, is_there_ND)
        return [
            ScoredRow(
                file=self._source.name,
                line=row.line,
                time=row.label,
                score=None if row.reason else short(score),
                is_anomaly=None if row.reason else score > 1,
                reason=row.reason,
                by_error=[] if row.reason else [Share(metric, short(value)) for metric, value in shares],
                by_z=[] if row.reason else [ZScore(metric, short(value)) for metric, value in zs],
            )
            for row, score, shares, zs in zip(rows, scores_N.tolist(), by_error, by_z, strict=True)
        ]

    def _worst(
        self, order_ND: Floats, values_ND: Floats, is_there_ND: NDArray[np.bool_]
    ) -> Iterator[list[tuple[str, float]]]:
        """For each row the metrics that have a value and stand first in descending `order`, with what is said of them.

        A metric that is missing in the row, although it has a part in the error of its window, is not to blame for it.
        """
        order_ND = np.where(is_there_ND, order_ND, -1)
        num_named = min(NUM_NAMED, order_ND.shape[1])
        first_NK = np.argpartition(-order_ND, num_named - 1, axis=1)[:, :num_named]
        rank_NK = np.argsort(-np.take_along_axis(order_ND, first_NK, axis=1), axis=1, kind="stable")
        first_NK = np.take_along_axis(first_NK, rank_NK, axis=1)
        names = self._detector.metric_names
        values_NK, is_there_NK = (np.take_along_axis(array, first_NK, axis=1) for array in (values_ND, is_there_ND))
        for metrics, values, are_there in zip(first_NK.tolist(), values_NK.tolist(), is_there_NK.tolist(), strict=True):
            named = zip(metrics, values, are_there, strict=True)
            yield [(names[metric], value) for metric, value, is_there in named if is_there]


def short(value: float) -> float:
    """As many digits as a float32 has."""
    return float(f"{value:.7g}")
