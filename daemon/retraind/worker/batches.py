"""Scaled rows from the cache file to batches on the device: one gather a batch, never row by row.

Owns the order of rows: a function of seed and epoch alone, every row exactly once an epoch. Rows up to WINDOW_BYTES
are read once and stay; a bigger file is streamed through one window of that size, so memory does not grow with it.
Never writes. Raises HostError host_io when the file is shorter than was said, OSError unchanged.
"""

# N rows of a window, B rows of a batch, D metrics
# ruff: noqa: N803, N806  (tensors carry their shape)

import hashlib
import logging
import os
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from retraind.errors import HostError
from retraind.worker.emit import die_with_parent

log = logging.getLogger(__name__)

# A million rows of 32 metrics: the rows of most jobs, and still small beside torch itself, which takes 220 MiB.
WINDOW_BYTES = 128 * 2**20
# Rows that stay neighbours when a file is streamed: 4 MiB are read at full speed from any disk, and a window still
# mixes 32 places of the file.
BLOCK_BYTES = 4 * 2**20
FLOAT_BYTES = 4
# A permutation holds one int64 a row; with few metrics it outweighs the rows, so it counts.
INDEX_BYTES = 8
# Evaluation must not use up the time of a job, and the error of a quarter million rows is known to three digits.
MAX_HELDOUT_ROWS = 262_144
# What torch's loader keeps ready per process by default.
PREFETCH_BATCHES = 2
# Loader processes that have delivered nothing for so long are stuck, or one died with the lock of their queue. Being
# wrong costs nothing but a warning: the training process gathers on its own.
LOADER_TIMEOUT_SECONDS = 10.0
SHM_DIR = Path("/dev/shm")  # noqa: S108  (where torch puts the batches of loader processes)


@dataclass(frozen=True)
class RowRange:
    """`num_rows` rows of `num_metrics` little-endian float32 values in a raw C-order file, from row `start` on."""

    path: Path
    num_metrics: int
    start: int
    num_rows: int

    @property
    def row_bytes(self) -> int:
        return self.num_metrics * FLOAT_BYTES


def split_rows(rows: RowRange, holdout_share: float) -> tuple[RowRange, RowRange | None]:
    """The part to train on and the last rows in time, held out; None where training would keep under two rows."""
    num_heldout = min(int(rows.num_rows * holdout_share), MAX_HELDOUT_ROWS)
    num_training = rows.num_rows - num_heldout
    if num_heldout == 0 or num_training < 2:
        return rows, None
    training = RowRange(rows.path, rows.num_metrics, rows.start, num_training)
    return training, RowRange(rows.path, rows.num_metrics, rows.start + num_training, num_heldout)


def last_rows(rows: RowRange, limit: int) -> RowRange:
    """The last `limit` rows, or all."""
    num_rows = min(rows.num_rows, limit)
    return RowRange(rows.path, rows.num_metrics, rows.start + rows.num_rows - num_rows, num_rows)


def cut(num_rows: int, size: int) -> list[tuple[int, int]]:
    """Half-open ranges of `size` rows over all rows; the last is what remains.

    A remainder of one row joins the range before it: BatchNorm can not train on a single row.
    """
    stops = list(range(size, num_rows, size))
    if stops and num_rows - stops[-1] == 1:
        stops.pop()
    return list(zip([0, *stops], [*stops, num_rows], strict=True))


def plan_windows(num_rows: int, block_rows: int, window_rows: int, order: Tensor) -> list[list[tuple[int, int]]]:
    """Which rows make up which window of an epoch: lists of half-open ranges, together every row once.

    `order` is a permutation of the file's blocks of `block_rows` rows. Windows hold `window_rows` rows as `cut` says.
    """
    starts = [block * block_rows for block in order.tolist()]
    runs = deque((start, min(start + block_rows, num_rows)) for start in starts)
    windows = []
    for window_start, window_stop in cut(num_rows, window_rows):
        missing = window_stop - window_start
        window = []
        while missing:
            start, stop = runs.popleft()
            taken = min(missing, stop - start)
            window.append((start, start + taken))
            if start + taken < stop:
                runs.appendleft((start + taken, stop))
            missing -= taken
        windows.append(window)
    return windows


def read_rows(rows: RowRange, ranges: list[tuple[int, int]], into_ND: Tensor) -> Tensor:
    """Reads ranges of rows one after the other into the head of a buffer and returns that head, a view."""
    num_rows = sum(stop - start for start, stop in ranges)
    head_ND = into_ND[:num_rows]
    target = head_ND.numpy().data.cast("B")
    with rows.path.open("rb", buffering=0) as file:
        for start, stop in ranges:
            part = target[: (stop - start) * rows.row_bytes]
            target = target[len(part) :]
            file.seek((rows.start + start) * rows.row_bytes)
            while part:
                num_bytes = file.readinto(part)
                if not num_bytes:
                    raise HostError(
                        "host_io", f"{rows.path} ends before row {rows.start + stop}", remedy="look for a full disk"
                    )
                part = part[num_bytes:]
    return head_ND


def read_blocks(rows: RowRange) -> Iterator[Tensor]:
    """The rows in file order, about BLOCK_BYTES at a time, on the CPU. A block is valid until the next one is read."""
    block_rows = max(1, BLOCK_BYTES // rows.row_bytes)
    buffer_ND = torch.empty(min(block_rows, rows.num_rows), rows.num_metrics)
    for start in range(0, rows.num_rows, block_rows):
        yield read_rows(rows, [(start, min(start + block_rows, rows.num_rows))], buffer_ND)


def generator_for(seed: int, epoch: int) -> torch.Generator:
    """A generator on the CPU for one epoch. Hashed, because neighbouring seeds of neighbouring epochs would meet."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


class Batches:
    """The batches of every epoch, as float32 tensors on the device.

    Costs one window of host memory, pinned for CUDA, and there up to two windows of device memory: the one that the
    queued steps gather from and the one that is filled.
    """

    def __init__(
        self,
        rows: RowRange,
        batch_size: int,
        *,
        seed: int,
        device: torch.device,
        num_workers: int = 0,
        window_bytes: int = WINDOW_BYTES,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.device = device
        # Whole batches, so that only the last window of an epoch has a remainder.
        fitting = window_bytes // (rows.row_bytes + INDEX_BYTES)
        self.window_rows = max(1, fitting // batch_size) * batch_size
        self.block_rows = max(1, block_bytes // rows.row_bytes)
        self.num_workers = usable_workers(num_workers, batch_size * rows.row_bytes)
        self._is_cuda = device.type == "cuda"
        # One row more than a window: the row that `cut` merges. Loader processes are forks, and pinned memory is not
        # promised to be there after a fork.
        self._host_ND = torch.empty(
            min(self.window_rows + 1, rows.num_rows),
            rows.num_metrics,
            pin_memory=self._is_cuda and not self.num_workers,
        )
        self._copied = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._is_resident = len(cut(rows.num_rows, self.window_rows)) == 1
        self._resident_ND: Tensor | None = None

    def epoch(self, epoch: int, num_done: int = 0) -> Iterator[Tensor]:
        """Every row once, shuffled, without the first `num_done` batches. A batch is the caller's own.

        Windows that are done are not read, but their order is drawn: the rest of the epoch is what it would have been.
        """
        generator = generator_for(self.seed, epoch)
        for ranges in self._plan(generator):
            num_rows = sum(stop - start for start, stop in ranges)
            order_N = torch.randperm(num_rows, generator=generator)
            cuts = cut(num_rows, self.batch_size)
            if num_done < len(cuts):
                yield from self._gather(self._window(ranges), order_N, cuts[num_done:])
            num_done = max(0, num_done - len(cuts))

    def _plan(self, generator: torch.Generator) -> list[list[tuple[int, int]]]:
        """The ranges of rows that make up each window of an epoch."""
        num_rows = self.rows.num_rows
        if self._is_resident:
            return [[(0, num_rows)]]
        num_blocks = -(-num_rows // self.block_rows)
        order = torch.randperm(num_blocks, generator=generator)
        return plan_windows(num_rows, self.block_rows, self.window_rows, order)

    def _window(self, ranges: list[tuple[int, int]]) -> Tensor:
        """A window, on the device when this process gathers, on the host when loader processes do."""
        if not self._is_resident:
            return self._load(ranges)
        if self._resident_ND is None:
            self._resident_ND = self._load(ranges)
        return self._resident_ND

    def _load(self, ranges: list[tuple[int, int]]) -> Tensor:
        """Reads one window. The host buffer is used again, so on CUDA its last copy must have left it first."""
        if self._copied is not None:
            self._copied.synchronize()
        host_ND = read_rows(self.rows, ranges, self._host_ND)
        if self._copied is None or self.num_workers:
            return host_ND
        window_ND = host_ND.to(self.device, non_blocking=True)
        self._copied.record()
        return window_ND

    def _gather(self, window_ND: Tensor, order_N: Tensor, cuts: list[tuple[int, int]]) -> Iterator[Tensor]:
        """The batches of `cuts`. What loader processes fail to deliver is gathered here, in the same order."""
        if self.num_workers:
            try:
                for x_BD in self._load_in_processes(window_ND, [order_N[start:stop] for start, stop in cuts]):
                    yield x_BD.to(self.device, non_blocking=True)
                    cuts.pop(0)
            except LoaderFailed as error:
                log.warning("loader processes failed, going on without: %s", error)
                self.num_workers = 0
        # Once a window: a copy of each batch's indices would make the host wait for the device every time.
        order_N = order_N.to(window_ND.device)
        for start, stop in cuts:
            x_BD = torch.index_select(window_ND, 0, order_N[start:stop])
            yield x_BD.to(self.device)

    def _load_in_processes(self, window_ND: Tensor, indices: list[Tensor]) -> Iterator[Tensor]:
        """Batches by way of torch's loader, in order. Raises LoaderFailed when its processes can not do it."""
        loader: DataLoader[Tensor] = DataLoader(
            _Gather(window_ND),
            batch_size=None,
            sampler=cast("list[int]", indices),
            num_workers=self.num_workers,
            prefetch_factor=PREFETCH_BATCHES,
            pin_memory=self._is_cuda,
            timeout=LOADER_TIMEOUT_SECONDS,
            multiprocessing_context="fork",  # shares the window without a copy; the children never touch CUDA
            worker_init_fn=_start_loader_process,
        )
        handler = signal.getsignal(signal.SIGCHLD)
        try:
            batches = iter(loader)
            # torch's handler would raise in the middle of a training step; next() below finds a dead process as well.
            signal.signal(signal.SIGCHLD, handler)
        except (RuntimeError, OSError) as error:
            raise LoaderFailed(repr(error)) from error
        while True:
            try:
                x_BD = next(batches)
            except StopIteration:
                return
            except Exception as error:
                raise LoaderFailed(repr(error)) from error
            yield x_BD


class LoaderFailed(Exception):
    """Loader processes did not start, died or stood still."""


class _Gather(Dataset[Tensor]):
    """A window as torch's loader wants it: one item is one whole batch."""

    def __init__(self, window_ND: Tensor) -> None:
        self.window_ND = window_ND

    def __getitem__(self, index_B: Tensor) -> Tensor:
        return torch.index_select(self.window_ND, 0, index_B)


def _start_loader_process(_: int) -> None:
    """A loader process that outlives the worker would hold its memory for ever."""
    die_with_parent()
    torch.set_num_threads(1)


def usable_workers(num_workers: int, batch_bytes: int) -> int:
    """`num_workers`, or 0 with a warning when /dev/shm can not hold the batches that would travel through it.

    Writing beyond a full /dev/shm is not an error that a process can catch: it dies of SIGBUS.
    """
    if not num_workers:
        return 0
    needed = num_workers * PREFETCH_BATCHES * batch_bytes * 2
    try:
        facts = os.statvfs(SHM_DIR)
    except OSError as error:
        log.warning("training.num_workers is not used: %s", error)
        return 0
    if (free := facts.f_bavail * facts.f_frsize) < needed:
        log.warning("training.num_workers is not used: %s has %d bytes free, %d are needed", SHM_DIR, free, needed)
        return 0
    return num_workers
