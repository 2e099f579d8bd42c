"""What stands out among held-out rows: how scores are spread, when they were high, the worst rows and their metrics.

Owns what is kept of each row while blocks go by: its error, and the metrics of the worst rows so far. For people: a
version's page and `retraind models show`. Never decides. Memory is 4 bytes a row and MAX_WORST_ROWS rows of metrics.
"""

# N rows, B rows of a block, D metrics, K kept rows
# ruff: noqa: N803, N806  (tensors carry their shape)

import torch
from torch import Tensor

from retraind.report import Histogram, MetricShare, ScoredRow, ScoreSeries
from retraind.worker.rows import RowRange
from retraind.worker.scaler import SOFT_LIMIT, harden

MAX_WORST_ROWS = 20
# Metrics that are named for each row: most faults show in one or two.
NUM_NAMED = 5
MAX_POINTS = 400
NUM_BINS = 40


class Seen:
    """The errors of rows, added block by block in the order of the file."""

    def __init__(self, rows: RowRange, metric_names: list[str]) -> None:
        self._first_row = rows.start
        self._metric_names = metric_names
        self._errors_N = torch.empty(rows.num_rows)
        self._num_done = 0
        self._worst_rows = torch.empty(0, dtype=torch.int64)
        self._worst_KD = torch.empty(0, rows.num_metrics)
        self._worst_values_KD = torch.empty(0, rows.num_metrics)

    def add(self, errors_BD: Tensor, values_BD: Tensor) -> None:
        """The errors of a block by metric, and its scaled values. A row without any value counts as usual: 0."""
        errors_BD, values_BD = errors_BD.cpu(), values_BD.cpu()
        errors_B = errors_BD.mean(dim=1).nan_to_num_(nan=0.0)
        self._errors_N[self._num_done : self._num_done + len(errors_B)] = errors_B
        top_B = errors_B.topk(min(MAX_WORST_ROWS, len(errors_B))).indices
        rows = torch.cat([self._worst_rows, top_B + self._num_done])
        errors_KD = torch.cat([self._worst_KD, errors_BD[top_B]])
        values_KD = torch.cat([self._worst_values_KD, values_BD[top_B]])
        order = self._errors_N[rows].argsort(descending=True, stable=True)[:MAX_WORST_ROWS]
        self._worst_rows, self._worst_KD, self._worst_values_KD = rows[order], errors_KD[order], values_KD[order]
        self._num_done += len(errors_B)

    def errors(self) -> Tensor:
        """One error a row, shape (N,)."""
        return self._errors_N[: self._num_done]

    def histogram(self, threshold: float) -> Histogram:
        """Of the scores, in equal steps from 0 to the largest, or to twice the threshold where that is more."""
        scores_N = self.errors() / threshold
        top = max(2.0, scores_N.max().item())
        counts = torch.histc(scores_N, NUM_BINS, min=0.0, max=top)
        return Histogram(edges=[top * i / NUM_BINS for i in range(NUM_BINS + 1)], counts=counts.long().tolist())

    def series(self, threshold: float) -> ScoreSeries:
        """The scores over time, thinned to MAX_POINTS points."""
        scores_N = self.errors() / threshold
        step = -(-len(scores_N) // MAX_POINTS)
        maxima = [part.max().item() for part in torch.split(scores_N, step)]
        return ScoreSeries(first_row=self._first_row, rows_per_point=step, maxima=maxima)

    def worst_rows(self, threshold: float) -> list[ScoredRow]:
        """The rows with the largest scores, the largest first, each with the metrics that make it up."""
        return [
            ScoredRow(
                row=self._first_row + row,
                score=self._errors_N[row].item() / threshold,
                metrics=self._metrics(errors_D, values_D),
            )
            for row, errors_D, values_D in zip(
                self._worst_rows.tolist(), self._worst_KD, self._worst_values_KD, strict=True
            )
        ]

    def _metrics(self, errors_D: Tensor, values_D: Tensor) -> list[MetricShare]:
        total = max(errors_D.sum().item(), torch.finfo(torch.float32).tiny)
        order = errors_D.argsort(descending=True, stable=True)[:NUM_NAMED].tolist()
        return [
            MetricShare(
                name=self._metric_names[metric],
                share=errors_D[metric].item() / total,
                z=float(harden(values_D[metric].nan_to_num(nan=0.0).double().numpy(), SOFT_LIMIT)),
            )
            for metric in order
        ]
