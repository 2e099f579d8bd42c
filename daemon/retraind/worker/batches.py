"""Windows of scaled rows to batches on the device: one gather a batch, never row by row.

Owns the order of rows: a function of seed and epoch alone, every row exactly once an epoch. Rows up to CHUNK_BYTES
are read once and stay; a bigger file is streamed through one chunk of that size, so memory does not grow with it.
Never writes. Raises HostError host_io when the file is shorter than was said, OSError unchanged.
"""

# N rows of a chunk, S its slots, B rows of a batch, D metrics, F = window x metrics
# ruff: noqa: N803, N806  (tensors carry their shape)

import hashlib
import logging
import os
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from retraind.worker.emit import die_with_parent
from retraind.worker.rows import BLOCK_BYTES, RowRange, WindowReader, windows_of

log = logging.getLogger(__name__)

# A million rows of 32 metrics: the rows of most jobs, and still small beside torch itself, which takes 220 MiB.
CHUNK_BYTES = 128 * 2**20
# A permutation holds one int64 a row; with few metrics it outweighs the rows, so it counts.
INDEX_BYTES = 8
# What torch's loader keeps ready per process by default.
PREFETCH_BATCHES = 2
# Loader processes that have delivered nothing for so long are stuck, or one died with the lock of their queue. Being
# wrong costs nothing but a warning: the training process gathers on its own.
LOADER_TIMEOUT_SECONDS = 10.0
SHM_DIR = Path("/dev/shm")  # noqa: S108  (where torch puts the batches of loader processes)


def cut(num_rows: int, size: int) -> list[tuple[int, int]]:
    """Half-open ranges of `size` rows over all rows; the last is what remains.

    A remainder of one row joins the range before it: BatchNorm can not train on a single row.
    """
    stops = list(range(size, num_rows, size))
    if stops and num_rows - stops[-1] == 1:
        stops.pop()
    return list(zip([0, *stops], [*stops, num_rows], strict=True))


def plan_chunks(num_rows: int, block_rows: int, chunk_rows: int, order: Tensor) -> list[list[tuple[int, int]]]:
    """Which rows make up which chunk of an epoch: lists of half-open ranges, together every row once.

    `order` is a permutation of the file's blocks of `block_rows` rows. Chunks hold `chunk_rows` rows as `cut` says: a
    chunk mixes some 32 places of the file.
    """
    starts = [block * block_rows for block in order.tolist()]
    runs = deque((start, min(start + block_rows, num_rows)) for start in starts)
    chunks = []
    for chunk_start, chunk_stop in cut(num_rows, chunk_rows):
        missing = chunk_stop - chunk_start
        chunk = []
        while missing:
            start, stop = runs.popleft()
            taken = min(missing, stop - start)
            chunk.append((start, start + taken))
            if start + taken < stop:
                runs.appendleft((start + taken, stop))
            missing -= taken
        chunks.append(chunk)
    return chunks


def generator_for(seed: int, epoch: int) -> torch.Generator:
    """A generator on the CPU for one epoch. Hashed, because neighbouring seeds of neighbouring epochs would meet."""
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


class Batches:
    """The batches of every epoch, as float32 tensors on the device, shape (B, F).

    Costs one chunk of host memory, pinned for CUDA, and there up to two chunks of device memory: the one that the
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
        chunk_bytes: int = CHUNK_BYTES,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.device = device
        # Whole batches, so that only the last chunk of an epoch has a remainder.
        fitting = chunk_bytes // (rows.row_bytes + INDEX_BYTES)
        self.chunk_rows = max(1, fitting // batch_size) * batch_size
        self.block_rows = max(1, block_bytes // rows.row_bytes)
        self.num_workers = usable_workers(num_workers, batch_size * rows.row_bytes * rows.window)
        self._is_cuda = device.type == "cuda"
        # Loader processes are forks, and pinned memory is not promised to be there after a fork.
        self._reader = WindowReader(rows, pin_memory=self._is_cuda and not self.num_workers)
        self._copied = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._is_resident = len(cut(rows.num_rows, self.chunk_rows)) == 1
        self._resident: tuple[Tensor, Tensor] | None = None

    def epoch(self, epoch: int, num_done: int = 0) -> Iterator[Tensor]:
        """Every row's window once, shuffled, without the first `num_done` batches. A batch is the caller's own.

        Chunks that are done are not read, but their order is drawn: the rest of the epoch is what it would have been.
        """
        generator = generator_for(self.seed, epoch)
        for ranges in self._plan(generator):
            num_rows = sum(stop - start for start, stop in ranges)
            order_N = torch.randperm(num_rows, generator=generator)
            cuts = cut(num_rows, self.batch_size)
            if num_done < len(cuts):
                slots_SD, first_slots_N = self._chunk(ranges)
                yield from self._gather(slots_SD, first_slots_N[order_N], cuts[num_done:])
            num_done = max(0, num_done - len(cuts))

    def _plan(self, generator: torch.Generator) -> list[list[tuple[int, int]]]:
        """The ranges of rows that make up each chunk of an epoch."""
        num_rows = self.rows.num_rows
        if self._is_resident:
            return [[(0, num_rows)]]
        num_blocks = -(-num_rows // self.block_rows)
        order = torch.randperm(num_blocks, generator=generator)
        return plan_chunks(num_rows, self.block_rows, self.chunk_rows, order)

    def _chunk(self, ranges: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """A chunk's slots, on the device when this process gathers, on the host when loader processes do.

        With them where the window of each row begins, always on the host.
        """
        if not self._is_resident:
            return self._load(ranges)
        if self._resident is None:
            self._resident = self._load(ranges)
        return self._resident

    def _load(self, ranges: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Reads one chunk. The host buffer is used again, so on CUDA its last copy must have left it first."""
        if self._copied is not None:
            self._copied.synchronize()
        slots_SD, first_slots_N = self._reader.read(ranges)
        if self._copied is None or self.num_workers:
            return slots_SD, first_slots_N
        slots_SD = slots_SD.to(self.device, non_blocking=True)
        self._copied.record()
        return slots_SD, first_slots_N

    def _gather(self, slots_SD: Tensor, order_N: Tensor, cuts: list[tuple[int, int]]) -> Iterator[Tensor]:
        """The batches of `cuts`. What loader processes fail to deliver is gathered here, in the same order."""
        windows_SF = windows_of(slots_SD, self.rows.window)
        if self.num_workers:
            try:
                for x_BF in self._load_in_processes(windows_SF, [order_N[start:stop] for start, stop in cuts]):
                    yield x_BF.to(self.device, non_blocking=True)
                    cuts.pop(0)
            except LoaderFailed as error:
                log.warning("loader processes failed, going on without: %s", error)
                self.num_workers = 0
        # Once a chunk: a copy of each batch's indices would make the host wait for the device every time.
        order_N = order_N.to(windows_SF.device)
        for start, stop in cuts:
            x_BF = torch.index_select(windows_SF, 0, order_N[start:stop])
            yield x_BF.to(self.device)

    def _load_in_processes(self, windows_SF: Tensor, indices: list[Tensor]) -> Iterator[Tensor]:
        """Batches by way of torch's loader, in order. Raises LoaderFailed when its processes can not do it."""
        loader: DataLoader[Tensor] = DataLoader(
            _Gather(windows_SF),
            batch_size=None,
            sampler=cast("list[int]", indices),
            num_workers=self.num_workers,
            prefetch_factor=PREFETCH_BATCHES,
            pin_memory=self._is_cuda,
            timeout=LOADER_TIMEOUT_SECONDS,
            multiprocessing_context="fork",  # shares the chunk without a copy; the children never touch CUDA
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
                x_BF = next(batches)
            except StopIteration:
                return
            except Exception as error:
                raise LoaderFailed(repr(error)) from error
            yield x_BF


class LoaderFailed(Exception):
    """Loader processes did not start, died or stood still."""


class _Gather(Dataset[Tensor]):
    """A chunk as torch's loader wants it: one item is one whole batch."""

    def __init__(self, windows_SF: Tensor) -> None:
        self.windows_SF = windows_SF

    def __getitem__(self, index_B: Tensor) -> Tensor:
        return torch.index_select(self.windows_SF, 0, index_B)


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
