"""Reads bytes through the real readers, for the tests of all formats."""

import numpy as np
import pytest

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.readers import open_reader
from retraind.worker.readers.columns import choose_metrics
from retraind.worker.readers.source import Source
from retraind.worker.readers.tally import Tally


class Everything(Tally):
    """Gives back all rows of a table with gaps, as NaN: what a reader understood, before rows are judged."""

    def usable_rows(self, rows_ND, place, lines=None):  # noqa: N803  (as Tally has it)
        return rows_ND


class Read:
    """What became of some bytes."""

    def __init__(self, tmp_path, data, tally=None, **limits):
        path = tmp_path / "data"
        path.write_bytes(data)
        config = DataConfig(**limits)
        self.tally = tally or Tally()
        with Source(path, config) as source:
            reader = open_reader(source, config)
            self.format = reader.format
            self.names, ignored = choose_metrics(reader.columns, config)
            self.ignored = {column.name: column.reason for column in ignored}
            self.blocks = list(reader.rows(self.names, self.tally))
            source.finish()
        self.rows = np.concatenate(self.blocks)
        self.dropped = {reason: count for reason, count in self.tally.num_dropped.items() if count}
        self.num_gaps = int(np.isnan(self.rows).sum())
        self.num_non_finite = self.tally.num_non_finite_cells
        self.problems = [(p.line, p.column, p.reason, p.text) for p in self.tally.problems]


def with_gaps(rows, *cells):
    """The rows with NaN in some cells, each by its row and column."""
    rows = np.array(rows, dtype=np.float64)
    for cell in cells:
        rows[cell] = np.nan
    return rows


def refusal(tmp_path, data, **limits):
    with pytest.raises(DataError) as raised:
        Read(tmp_path, data, **limits)
    return raised.value
