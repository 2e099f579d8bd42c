"""The cache of scaled rows read back: ranges of rows, and for each row the window of rows that ends with it.

Owns which rows make up a window. A window is `window` consecutive rows as one vector, the oldest first; it never
reaches across a break, and where history is missing the oldest row there is stands in for it, so that every row has
exactly one. Rows lie in memory once, however long windows are: a window is a view. Never writes. Raises HostError
host_io when the file is shorter than was said, OSError unchanged.
"""

# N rows, B rows of a block, D metrics, F = window x metrics, S slots of a buffer
# ruff: noqa: N803, N806  (tensors carry their shape)

import io
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from retraind.errors import HostError

FLOAT_BYTES = 4
# Rows that stay neighbours when a file is streamed: 4 MiB are read at full speed from any disk.
BLOCK_BYTES = 4 * 2**20
# A sample of a day must not be that of one hour.
MIN_PLACES = 32
# Evaluation must not use up the time of a job, and the error of a quarter million rows is known to three digits.
MAX_HELDOUT_ROWS = 262_144


@dataclass(frozen=True)
class RowRange:
    """`num_rows` rows of `num_metrics` little-endian float32 values in a raw C-order file, from row `start` on.

    `breaks` are the rows of the file, ascending, that do not follow on the row before them. A value that was missing
    is NaN, and `has_missing` says that there may be some.
    """

    path: Path
    num_metrics: int
    start: int
    num_rows: int
    window: int = 1
    breaks: tuple[int, ...] = ()
    has_missing: bool = False

    @property
    def row_bytes(self) -> int:
        return self.num_metrics * FLOAT_BYTES

    @property
    def input_dim(self) -> int:
        """The length of a window as a vector."""
        return self.num_metrics * self.window

    def part(self, start: int, num_rows: int) -> "RowRange":
        """`num_rows` of these rows from `start` on. The windows of the first reach back to rows before them."""
        return replace(self, start=self.start + start, num_rows=num_rows)

    def seen_through(self, window: int) -> "RowRange":
        """The same rows with windows of another length."""
        return replace(self, window=window)


def split_rows(rows: RowRange, holdout_share: float) -> tuple[RowRange, RowRange | None]:
    """The part to train on and the last rows in time, held out; None where training would keep under two rows."""
    num_heldout = min(int(rows.num_rows * holdout_share), MAX_HELDOUT_ROWS)
    num_training = rows.num_rows - num_heldout
    if num_heldout == 0 or num_training < 2:
        return rows, None
    return rows.part(0, num_training), rows.part(num_training, num_heldout)


def last_rows(rows: RowRange, limit: int) -> RowRange:
    """The last `limit` rows, or all."""
    num_rows = min(rows.num_rows, limit)
    return rows.part(rows.num_rows - num_rows, num_rows)


def after_last_break(rows: RowRange) -> RowRange:
    """The last of these rows that all follow on each other."""
    index = bisect_right(rows.breaks, rows.start + rows.num_rows - 1)
    skipped = max(rows.breaks[index - 1] - rows.start, 0) if index else 0
    return rows.part(skipped, rows.num_rows - skipped)


@dataclass(frozen=True)
class Piece:
    """Consecutive rows `start` to `stop` of the file, `num_history` rows before them, and copies in their stead."""

    start: int
    stop: int
    num_history: int
    num_copies: int

    @property
    def num_slots(self) -> int:
        return self.num_copies + self.num_history + self.stop - self.start


def pieces(rows: RowRange, ranges: list[tuple[int, int]]) -> Iterator[Piece]:
    """Half-open ranges of rows, cut at breaks, each with what the windows of its rows need before it."""
    num_needed = rows.window - 1
    for range_start, range_stop in ranges:
        start, stop = rows.start + range_start, rows.start + range_stop
        index = bisect_right(rows.breaks, start)
        stretch = rows.breaks[index - 1] if index else 0
        while start < stop:
            end = min(rows.breaks[index], stop) if index < len(rows.breaks) else stop
            num_history = min(num_needed, start - stretch)
            yield Piece(start, end, num_history, num_needed - num_history)
            start = stretch = end
            index += 1


class WindowReader:
    """Reads ranges of rows into one buffer that it keeps, and gives their windows as views of it."""

    def __init__(self, rows: RowRange, *, pin_memory: bool = False) -> None:
        self._rows = rows
        self._pin_memory = pin_memory
        self._buffer_SD = torch.empty(0, rows.num_metrics)

    def read(self, ranges: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """The slots that were filled, shape (S, D), and for each row of the ranges the slot where its window begins.

        Both are valid until the next call: the slots are a view of the buffer.
        """
        found = list(pieces(self._rows, ranges))
        num_slots = sum(piece.num_slots for piece in found)
        if num_slots > len(self._buffer_SD):
            self._buffer_SD = torch.empty(num_slots, self._rows.num_metrics, pin_memory=self._pin_memory)
        first_slots, slot = [], 0
        with self._rows.path.open("rb", buffering=0) as file:
            for piece in found:
                first_slots.append(torch.arange(slot, slot + piece.stop - piece.start))
                begin, slot = slot + piece.num_copies, slot + piece.num_slots
                file.seek((piece.start - piece.num_history) * self._rows.row_bytes)
                self._fill(self._buffer_SD[begin:slot], file)
                self._buffer_SD[begin - piece.num_copies : begin] = self._buffer_SD[begin]
        return self._buffer_SD[:num_slots], torch.cat(first_slots)

    def _fill(self, slots_SD: Tensor, file: io.FileIO) -> None:
        target = slots_SD.numpy().data.cast("B")
        while target:
            num_bytes = file.readinto(target)
            if not num_bytes:
                raise HostError(
                    "host_io",
                    f"{self._rows.path} ends before row {self._rows.start + self._rows.num_rows}",
                    remedy="look for a full disk",
                )
            target = target[num_bytes:]


def windows_of(slots_SD: Tensor, window: int) -> Tensor:
    """Every window of consecutive slots as one row, shape (S - window + 1, F): a view that takes no memory."""
    num_slots, num_metrics = slots_SD.shape
    assert slots_SD.is_contiguous(), "a window is a stretch of memory"
    return slots_SD.as_strided((num_slots - window + 1, window * num_metrics), (num_metrics, 1))


def read_blocks(rows: RowRange) -> Iterator[Tensor]:
    """The windows in the order of the file, shape (B, F), on the CPU. A block is valid until the next one is read.

    A block's windows come to about BLOCK_BYTES.
    """
    block_rows = max(1, BLOCK_BYTES // (rows.row_bytes * rows.window))
    reader = WindowReader(rows)
    for start in range(0, rows.num_rows, block_rows):
        num_rows = min(block_rows, rows.num_rows - start)
        slots_SD, first_slots_B = reader.read([(start, start + num_rows)])
        windows_BF = windows_of(slots_SD, rows.window)
        yield windows_BF if len(windows_BF) == num_rows else windows_BF.index_select(0, first_slots_B)


def spread_rows(rows: RowRange, limit: int) -> Iterator[Tensor]:
    """At most about `limit` windows from blocks that are spread evenly over the rows; all of them where they fit."""
    if rows.num_rows <= limit:
        yield from read_blocks(rows)
        return
    block_rows = max(1, min(limit // MIN_PLACES, BLOCK_BYTES // (rows.row_bytes * rows.window)))
    num_blocks = max(1, limit // block_rows)
    step = rows.num_rows / num_blocks
    for index in range(num_blocks):
        yield from read_blocks(rows.part(int(index * step), block_rows))


def present(x_BF: Tensor, *, has_missing: bool) -> Tensor:
    """The windows with 0, each metric's centre, for what is missing; as they are where nothing can be."""
    return torch.nan_to_num(x_BF, nan=0.0, posinf=torch.inf, neginf=-torch.inf) if has_missing else x_BF


def carried(x_BF: Tensor, num_metrics: int) -> Tensor:
    """The windows with a metric's value before it in its window for what is missing, else the one after, else 0.

    Of windows and not of rows, so that a row's score does not depend on how rows are cut into calls.
    """
    x_BWD = x_BF.reshape(len(x_BF), -1, num_metrics).clone()
    window = x_BWD.shape[1]
    forwards, backwards = (
        [(row, row - 1) for row in range(1, window)],
        [(row - 1, row) for row in range(window - 1, 0, -1)],
    )
    for to, source in forwards + backwards:
        torch.where(x_BWD[:, to].isnan(), x_BWD[:, source], x_BWD[:, to], out=x_BWD[:, to])
    return torch.nan_to_num_(x_BWD.view(x_BF.shape), nan=0.0, posinf=torch.inf, neginf=-torch.inf)
