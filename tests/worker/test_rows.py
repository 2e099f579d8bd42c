"""Windows of consecutive rows: which rows stand in each, at breaks, at the start of a file and of a range."""

from pathlib import Path

import numpy as np
import pytest
import torch

from retraind.worker.batches import Batches
from retraind.worker.rows import RowRange, WindowReader, after_last_break, read_blocks, spread_rows, windows_of

CPU = torch.device("cpu")
D, W = 3, 4


def write_rows(path, num_rows, **facts):
    """Row i holds i, i + 0.25, i + 0.5: every row can be told from its first value."""
    values = np.arange(num_rows, dtype="<f4")[:, None] + np.arange(D, dtype="<f4") * 0.25
    values.tofile(path)
    return RowRange(path, D, 0, num_rows, window=W, **facts)


def expected_window(row, stretch):
    """By the definition: the rows up to this one, never from before the stretch, whose first row stands in."""
    return [float(max(row - back, stretch)) for back in reversed(range(W))]


def stretch_of(row, breaks):
    return max([0, *(one for one in breaks if one <= row)])


def first_values(windows):
    assert windows.shape[1] == W * D
    cells = windows.reshape(len(windows), W, D)
    assert torch.equal(cells, cells[:, :, :1] + torch.arange(D) * 0.25)
    return cells[:, :, 0].tolist()


@pytest.mark.parametrize("breaks", [(), (1,), (7, 8, 30), tuple(range(1, 40))], ids=["none", "one", "some", "all"])
@pytest.mark.parametrize(("start", "num_rows"), [(0, 40), (0, 1), (5, 20), (8, 3), (39, 1)])
def test_a_window_holds_the_rows_before_and_never_reaches_across_a_break(tmp_path, breaks, start, num_rows):
    rows = write_rows(tmp_path / "rows", 40, breaks=breaks).part(start, num_rows)
    found = first_values(torch.cat([block.clone() for block in read_blocks(rows)]))
    wanted = range(start, start + num_rows)
    assert found == [expected_window(row, stretch_of(row, breaks)) for row in wanted]


def test_ranges_in_any_order_have_the_windows_of_their_rows(tmp_path):
    rows = write_rows(tmp_path / "rows", 40, breaks=(20,))
    slots, firsts = WindowReader(rows).read([(30, 33), (0, 2), (18, 22)])
    found = first_values(windows_of(slots, W)[firsts])
    assert found == [expected_window(row, stretch_of(row, (20,))) for row in [30, 31, 32, 0, 1, 18, 19, 20, 21]]


def test_without_a_window_rows_are_read_as_they_lie(tmp_path):
    rows = write_rows(tmp_path / "rows", 40, breaks=(7,)).seen_through(1)
    assert torch.cat([block.clone() for block in read_blocks(rows)])[:, 0].tolist() == list(range(40))


@pytest.mark.parametrize("sizes", [{}, {"chunk_bytes": 40 * 20, "block_bytes": 7 * 12}], ids=["resident", "streamed"])
def test_every_row_is_trained_on_once_an_epoch_with_its_own_window(tmp_path, sizes):
    breaks = (13, 200, 201)
    rows = write_rows(tmp_path / "rows", 333, breaks=breaks)
    batches = list(Batches(rows, 8, seed=1, device=CPU, **sizes).epoch(2))
    found = sorted(first_values(torch.cat(batches)), key=lambda window: window[-1])
    assert found == [expected_window(row, stretch_of(row, breaks)) for row in range(333)]


def test_longer_windows_take_no_more_memory_for_a_block(tmp_path):
    path = tmp_path / "rows"
    np.zeros((3000, 1024), "<f4").tofile(path)
    for window in (1, 5):
        blocks = [block.shape for block in read_blocks(RowRange(path, 1024, 0, 3000, window=window))]
        assert all(rows * width * 4 <= 4 * 2**20 for rows, width in blocks)
        assert sum(rows for rows, _ in blocks) == 3000


def test_a_sample_is_spread_over_all_rows_and_bounded(tmp_path):
    path = tmp_path / "rows"
    np.repeat(np.arange(40_000, dtype="<f4")[:, None], 256, axis=1).tofile(path)
    rows = RowRange(path, 256, 0, 40_000)
    seen = torch.cat([block[:, 0].clone() for block in spread_rows(rows, 10_000)])
    assert len(seen) <= 10_000
    assert seen.min() < 10_000 / 2
    assert seen.max() > 30_000 - 10_000 / 2
    assert len(set(seen.tolist())) == len(seen)
    assert sum(len(block) for block in spread_rows(rows, 40_000)) == 40_000


@pytest.mark.parametrize(
    ("start", "num_rows", "breaks", "expected"),
    [(10, 90, (), (10, 90)), (10, 90, (5, 40, 60), (60, 40)), (10, 90, (10,), (10, 90)), (10, 90, (5, 100), (10, 90)),
     (10, 90, (99,), (99, 1)), (0, 5, (3, 7), (3, 2))],
)  # fmt: skip
def test_the_rows_after_the_last_break_follow_on_each_other(start, num_rows, breaks, expected):
    found = after_last_break(RowRange(Path("rows"), 2, start, num_rows, breaks=breaks))
    assert (found.start, found.num_rows) == expected
