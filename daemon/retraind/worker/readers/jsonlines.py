"""JSON lines to rows of float64: one object a line, keys in any order, a key that is absent is a missing cell.

Owns what JSON leaves open: NaN and Infinity literals are taken as what they say, equal keys in one object make the line
malformed. Values must be numbers: nothing is converted from text, true, lists or objects. Raises DataError malformed.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter

import msgspec
import numpy as np
from numpy.typing import NDArray

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.printable import printable
from retraind.worker.readers.columns import SAMPLE_ROWS, Column, kind_of_column
from retraind.worker.readers.lines import Content, LineBlock, cut_lines
from retraind.worker.readers.numbers import MAX_MAGNITUDE, reason_against
from retraind.worker.readers.tally import Tally

# Decoded objects take about ten times the space of their text.
BLOCK_BYTES = 2**20
NUMBER_TYPES = frozenset({float, int})
CELL_TYPES = frozenset({float, int, type(None)})  # numpy makes NaN of None

Floats = NDArray[np.float64]
Object = dict[str, object]


class JsonLinesReader:
    """Reads one file of JSON lines. `columns` are the keys of the first rows, in order of appearance."""

    format = "jsonl"

    def __init__(self, source: Content, limits: DataConfig) -> None:
        self._blocks = cut_lines(source, BLOCK_BYTES, limits.max_line_bytes)
        self._first = next(self._blocks)  # there is one: the first byte that is not blank was seen
        # A decoded key may be a name with blanks around it, so the key is kept beside the name.
        self._keys, self.columns = _columns(self._first)

    def rows(self, metric_names: Sequence[str], tally: Tally) -> Iterator[Floats]:
        """Yields float64 arrays of shape (N, D), as DelimitedReader.rows does."""
        keys = [self._keys[name] for name in metric_names]
        label = None if tally.label is None else self._keys[tally.label]
        for block in chain([self._first], self._blocks):
            yield _parse(block, keys, tally, label)


def decode(line: bytes) -> Object | None:
    """The object on a line; None when the line is not one JSON object with distinct keys."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # also for NaN and Infinity, which are no JSON
        return _decode_leniently(line)
    if type(value) is not dict:
        return None
    return value if _has_distinct_keys(line, value) else _decode_leniently(line)


def _has_distinct_keys(line: bytes, value: Object) -> bool:
    """Proves it by counting, which is far cheaper than a second parse: of two equal keys one is gone from `value`.

    Every key has a colon and a pair of quotes, every string a pair of quotes. More can stand in the line, fewer can
    not: equality leaves no room for a key that is gone. False only means that this did not prove it.
    """
    if line.count(b":") == len(value):
        return True
    num_texts = sum(type(item) is str for item in value.values())
    return line.count(b'"') == 2 * (len(value) + num_texts)


def _decode_leniently(line: bytes) -> Object | None:
    try:
        value = json.loads(line, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):
        return None
    return value if type(value) is dict else None


def _distinct(pairs: list[tuple[str, object]]) -> Object:
    if len(value := dict(pairs)) != len(pairs):
        raise ValueError("equal keys in one object")
    return value


def _columns(block: LineBlock) -> tuple[dict[str, str], list[Column]]:
    """Key by name, and the columns of the sample."""
    kinds: dict[str, Counter[str]] = {}
    for index in range(min(SAMPLE_ROWS, len(block.ends))):
        for key, value in (decode(block.line(index)) or {}).items():
            kinds.setdefault(key, Counter())[_reason(value) or "number"] += 1
    if not kinds:
        raise DataError(
            "malformed",
            f"none of the first {min(SAMPLE_ROWS, len(block.ends)):,} lines is a JSON object",
            line=block.first_line,
            remedy="write one object a line: jq -c",
        )
    columns = [
        Column(
            printable(key.strip()) or f"column_{index}",
            kind_of_column(count["number"] + count["non_finite"], count["not_a_number"]),
        )
        for index, (key, count) in enumerate(kinds.items())
    ]
    return {column.name: key for column, key in zip(columns, kinds, strict=True)}, columns


def _reason(value: object) -> str | None:
    """Why a value is no finite number, by the same words as for text; None for a number."""
    if type(value) in NUMBER_TYPES:
        number = _as_float(value)  # type: ignore[arg-type]
        return "missing" if number != number else None if abs(number) <= MAX_MAGNITUDE else "non_finite"  # noqa: PLR0124
    if value is None:
        return "missing"
    if type(value) is str and (reason := reason_against(value)):
        return reason
    return "not_a_number"  # also a number in quotes: what quotes it may quote anything


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer beyond float64
        return float("inf")


def _parse(block: LineBlock, keys: list[str], tally: Tally, label: str | None) -> Floats:
    """The rows of a block, shape (N, D)."""
    pick = itemgetter(*keys) if len(keys) > 1 else lambda value: (value[keys[0]],)
    rows: list[Sequence[float | None]] = []
    numbers: list[int] = []
    for index, line in enumerate(block.data.split(b"\n")):
        if not line.strip():
            continue
        number = block.first_line + index
        value = decode(line)
        if value is None:
            is_tail = block.is_cut and index == len(block.ends) - 1
            tally.drop("truncated_tail" if is_tail else "malformed", number, text=line)
            continue
        if label is not None:
            tally.labelled(number, str(value.get(label, "")))
        try:
            cells = pick(value)
        except KeyError:
            cells = tuple(value.get(key) for key in keys)
        if not CELL_TYPES.issuperset(map(type, cells)):
            reasons = [_reason(cell) for cell in cells]
            if "not_a_number" in reasons:
                key, cell = keys[bad := reasons.index("not_a_number")], cells[bad]
                tally.drop("not_a_number", number, text=f"{key}: {cell!r:.40}")
                continue
            cells = [_value(cell, reason) for cell, reason in zip(cells, reasons, strict=True)]
        rows.append(cells)
        numbers.append(number)
    return tally.usable_rows(_stacked(rows, len(keys)), lambda row, metric: (numbers[row], None, keys[metric]), numbers)


def _value(cell: object, reason: str | None) -> float | None:
    """A cell that is a number or a word for none."""
    if reason is None:
        return cell  # type: ignore[return-value]
    return None if reason == "missing" else math.inf


def _stacked(rows: list[Sequence[float | None]], num_metrics: int) -> Floats:
    try:
        return np.array(rows, dtype=np.float64).reshape(-1, num_metrics)
    except OverflowError:  # an integer beyond float64
        floats = [[math.nan if cell is None else _as_float(cell) for cell in row] for row in rows]
        return np.array(floats).reshape(-1, num_metrics)
