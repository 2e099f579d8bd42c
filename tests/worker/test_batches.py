"""Rows to batches: every row once, in an order that seed and epoch decide, whatever the file's size."""

import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from retraind.errors import HostError
from retraind.worker.batches import Batches, cut, generator_for, plan_chunks, usable_workers
from retraind.worker.rows import MAX_HELDOUT_ROWS, RowRange, last_rows, read_blocks, split_rows

CPU = torch.device("cpu")
D = 3
# Python 3.12 and newer warn of a fork beside native threads, which numpy may have started.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def write_rows(path, num_rows, num_metrics=D):
    """Row i holds i, i + 0.25, ...: every row can be told from its first value."""
    values = np.arange(num_rows, dtype="<f4")[:, None] + np.arange(num_metrics, dtype="<f4") * 0.25
    values.astype("<f4").tofile(path)
    return RowRange(path, num_metrics, 0, num_rows)


def labels(batches_of_epoch):
    return [batch[:, 0].int().tolist() for batch in batches_of_epoch]


@pytest.mark.parametrize(
    ("num_rows", "size", "sizes"),
    [
        (1, 8, [1]),
        (2, 8, [2]),
        (8, 8, [8]),
        (9, 8, [9]),
        (10, 8, [8, 2]),
        (17, 8, [8, 9]),
        (2049, 2048, [2049]),
        (1000, 2048, [1000]),
        (5, 2, [2, 3]),
        (3, 2, [3]),
    ],
)
def test_a_last_batch_of_one_row_joins_the_one_before(num_rows, size, sizes):
    ranges = cut(num_rows, size)
    assert [stop - start for start, stop in ranges] == sizes
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(num_rows))


@pytest.mark.parametrize("num_rows", [2, 15, 16, 17, 33, 100, 101, 1000])
@pytest.mark.parametrize("block_rows", [1, 4, 7])
def test_windows_hold_every_row_once_and_are_full_but_for_the_last(num_rows, block_rows):
    order = torch.randperm(-(-num_rows // block_rows), generator=torch.Generator().manual_seed(num_rows))
    windows = plan_chunks(num_rows, block_rows, 16, order)
    rows = [[row for start, stop in window for row in range(start, stop)] for window in windows]
    assert sorted(itertools.chain(*rows)) == list(range(num_rows))
    assert [len(window) for window in rows] == [stop - start for start, stop in cut(num_rows, 16)]


# A window of 40 rows: 20 bytes a row with its index.
STREAMED = {"chunk_bytes": 40 * 20, "block_bytes": 7 * 12}
RESIDENT = {}


@pytest.mark.parametrize("sizes", [RESIDENT, STREAMED], ids=["resident", "streamed"])
@pytest.mark.parametrize("num_rows", [2, 9, 40, 41, 81, 333, 401])
def test_every_epoch_holds_every_row_once_in_a_new_order(tmp_path, num_rows, sizes):
    rows = write_rows(tmp_path / "rows", num_rows)
    batches = Batches(rows, 8, seed=1, device=CPU, **sizes)
    first, second = labels(batches.epoch(0)), labels(batches.epoch(1))
    for epoch in (first, second):
        assert sorted(itertools.chain(*epoch)) == list(range(num_rows))
        assert all(2 <= len(batch) <= 9 for batch in epoch)
    assert first != second or num_rows == 2


@pytest.mark.parametrize("sizes", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_the_order_depends_on_seed_and_epoch_alone(tmp_path, sizes):
    rows = write_rows(tmp_path / "rows", 333)
    batches = Batches(rows, 8, seed=1, device=CPU, **sizes)
    labels(batches.epoch(0))
    third = labels(batches.epoch(3))
    assert labels(Batches(rows, 8, seed=1, device=CPU, **sizes).epoch(3)) == third
    assert labels(Batches(rows, 8, seed=2, device=CPU, **sizes).epoch(3)) != third


@forks
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sizes", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_an_epoch_without_its_first_batches_is_the_rest_of_it(tmp_path, sizes, num_workers):
    rows = write_rows(tmp_path / "rows", 81)  # the last batch takes a ninth row
    whole = labels(Batches(rows, 8, seed=1, device=CPU, **sizes).epoch(3))
    for num_done in range(len(whole) + 1) if not num_workers else (3, 7):
        rest = Batches(rows, 8, seed=1, device=CPU, num_workers=num_workers, **sizes)
        assert labels(rest.epoch(3, num_done)) == whole[num_done:]
        assert labels(rest.epoch(4)) == labels(Batches(rows, 8, seed=1, device=CPU, **sizes).epoch(4))


def test_seed_and_epoch_are_not_added_up():
    assert generator_for(1, 2).initial_seed() != generator_for(2, 1).initial_seed()
    generator_for(2**63 - 1, 10)


def test_a_batch_holds_whole_rows_and_stays_as_it_is(tmp_path):
    rows = write_rows(tmp_path / "rows", 100)
    batches = list(Batches(rows, 8, seed=1, device=CPU, **STREAMED).epoch(0))
    for batch in batches:
        assert batch.dtype == torch.float32
        assert torch.equal(batch, batch[:, :1] + torch.arange(D) * 0.25)


def test_a_range_in_the_middle_of_the_file_is_read_alone(tmp_path):
    whole = write_rows(tmp_path / "rows", 100)
    rows = RowRange(whole.path, D, 30, 50)
    for sizes in (RESIDENT, STREAMED):
        assert sorted(itertools.chain(*labels(Batches(rows, 8, seed=0, device=CPU, **sizes).epoch(0)))) == list(
            range(30, 80)
        )
    assert torch.cat([block.clone() for block in read_blocks(rows)])[:, 0].tolist() == list(range(30, 80))


def test_blocks_follow_the_file_and_are_bounded(tmp_path):
    rows = write_rows(tmp_path / "rows", 9, num_metrics=2**19)  # 2 MiB a row
    seen = []
    for block in read_blocks(rows):
        assert block.nbytes <= 4 * 2**20
        seen += block[:, 0].tolist()
    assert seen == list(range(9))


def test_a_file_that_is_too_short_is_the_machines_fault(tmp_path):
    rows = write_rows(tmp_path / "rows", 100)
    os.truncate(rows.path, 50 * rows.row_bytes)
    with pytest.raises(HostError) as caught:
        list(Batches(rows, 8, seed=0, device=CPU).epoch(0))
    assert caught.value.code == "host_io"


@pytest.mark.parametrize(
    ("num_rows", "share", "num_training", "num_heldout"),
    [
        (2, 0.5, 2, 0),
        (3, 0.5, 2, 1),
        (10, 0.1, 9, 1),
        (9, 0.1, 9, 0),
        (1000, 0.0, 1000, 0),
        (1001, 0.1, 901, 100),
        (10_000_000, 0.5, 10_000_000 - MAX_HELDOUT_ROWS, MAX_HELDOUT_ROWS),
    ],
)
def test_the_last_rows_in_time_are_held_out_where_two_remain_to_train_on(
    tmp_path, num_rows, share, num_training, num_heldout
):
    training, heldout = split_rows(RowRange(tmp_path, D, 0, num_rows), share)
    assert (training.start, training.num_rows) == (0, num_training)
    assert heldout == (RowRange(tmp_path, D, num_training, num_heldout) if num_heldout else None)


def test_last_rows_end_where_the_range_ends(tmp_path):
    assert last_rows(RowRange(tmp_path, D, 5, 10), 4) == RowRange(tmp_path, D, 11, 4)
    assert last_rows(RowRange(tmp_path, D, 5, 10), 40) == RowRange(tmp_path, D, 5, 10)


MEASURE = """
import sys
from pathlib import Path
import torch
from retraind.worker.batches import Batches, RowRange
from retraind.worker.preflight import peak_bytes
rows = RowRange(Path(sys.argv[1]), 32, 0, int(sys.argv[2]))
torch.zeros(8, 32).index_select(0, torch.arange(8))
before = peak_bytes()
batches = Batches(rows, 2048, seed=0, device=torch.device("cpu"), chunk_bytes=16 * 2**20)
assert sum(len(batch) for batch in batches.epoch(0)) == rows.num_rows
print(peak_bytes() - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for num_rows in (2**18, 2**21):  # 32 and 256 MiB of zeros that take no space
        path = tmp_path / f"rows-{num_rows}"
        path.touch()
        os.truncate(path, num_rows * 128)
        command = [sys.executable, "-c", MEASURE, str(path), str(num_rows)]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout))
    assert all(peak < 48 * 2**20 for peak in peaks), peaks


@forks
@pytest.mark.parametrize("sizes", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_loader_processes_deliver_the_same_batches(tmp_path, sizes):
    rows = write_rows(tmp_path / "rows", 81)
    alone = Batches(rows, 8, seed=1, device=CPU, **sizes)
    helped = Batches(rows, 8, seed=1, device=CPU, num_workers=2, **sizes)
    handler = signal.getsignal(signal.SIGCHLD)
    for epoch in range(2):
        assert labels(helped.epoch(epoch)) == labels(alone.epoch(epoch))
    assert helped.num_workers == 2
    assert signal.getsignal(signal.SIGCHLD) == handler


@forks
def test_killed_loader_processes_cost_a_warning_and_no_row(tmp_path, caplog):
    rows = write_rows(tmp_path / "rows", 401)
    expected = labels(Batches(rows, 8, seed=1, device=CPU).epoch(0))
    helped = Batches(rows, 8, seed=1, device=CPU, num_workers=2)
    epoch = helped.epoch(0)
    seen = labels([next(epoch)])
    for child in multiprocessing.active_children():
        child.kill()
    assert seen + labels(epoch) == expected
    assert helped.num_workers == 0
    assert "loader processes failed" in caplog.text


def test_batches_too_large_for_shared_memory_are_gathered_in_the_training_process(caplog):
    with caplog.at_level(logging.WARNING):
        assert usable_workers(4, batch_bytes=2**50) == 0
    assert "/dev/shm" in caplog.text
    assert usable_workers(0, batch_bytes=2**50) == 0
    assert usable_workers(2, batch_bytes=1) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("sizes", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_batches_on_cuda_are_those_of_the_cpu(tmp_path, sizes):
    rows = write_rows(tmp_path / "rows", 333)
    expected = labels(Batches(rows, 8, seed=1, device=CPU, **sizes).epoch(0))
    on_device = list(Batches(rows, 8, seed=1, device=torch.device("cuda"), **sizes).epoch(0))
    assert all(batch.is_cuda for batch in on_device)
    assert labels(batch.cpu() for batch in on_device) == expected
