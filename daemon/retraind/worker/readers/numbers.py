"""What a cell of text is: a number, missing, not finite, or something else. Stricter than float() on purpose.

Owns the missing markers, the units and the decimal mark of a file. Never guesses: where both marks occur in one file
it raises DataError malformed. float() itself rounds correctly, so a cell that passes has its exact float64 value.
"""

import re
from collections.abc import Sequence

from retraind.errors import DataError

# Written by exporters, spreadsheets, database dumps and C libraries for "no value"; compared without case.
MISSING = frozenset(
    {"", "-", "--", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "null", "none", "#div/0!", "-1.#ind", "1.#ind"}
    | {"1.#qnan", "-1.#qnan"}
    | {"[n/a]", "[not supported]", "[unknown error]", "[insufficient permissions]", "[not found]", "err!"}  # nvidia-smi
)
NON_FINITE = frozenset(sign + word for sign in ("", "+", "-") for word in ("inf", "infinity", "1.#inf"))
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_COMMA_NUMBER = r"[+-]?(?:[0-9]+,[0-9]*|,[0-9]+)(?:[eE][+-]?[0-9]+)?"
NUMBER = re.compile(_NUMBER)
COMMA_NUMBER = re.compile(_COMMA_NUMBER)
# Separators of thousands beside a decimal mark: 1.234,5 or 1,234.5
BOTH_MARKS = re.compile(r"[+-]?[0-9]{1,3}(?:(?:\.[0-9]{3})+,|(?:,[0-9]{3})+\.)[0-9]+")
# The units that nvidia-smi and its kin write behind a number, with one blank between; "%" may follow at once.
UNITS = (
    "%",
    "B",
    "KiB",
    "MiB",
    "GiB",
    "W",
    "mW",
    "Hz",
    "kHz",
    "MHz",
    "GHz",
    "C",
    "V",
    "mV",
    "us",
    "ms",
    "s",
    "J",
    "mJ",
)
WITH_UNIT = re.compile(rf"({_NUMBER}|{_COMMA_NUMBER})(?: ({'|'.join(UNITS)})|(%))")
# What a cell without the unit of its column becomes: a number of something else, which is never added up with it.
NO_SUCH_UNIT = "?"
# What the C parser skips around a number as well, so that both ways of reading agree.
BLANKS = " \t\r\v\f"
# One pattern for a whole row: a call per row instead of one per cell. Cells are joined by LF.
NUMBER_ROW = re.compile(rf"[{BLANKS}]*{_NUMBER}[{BLANKS}]*(?:\n[{BLANKS}]*{_NUMBER}[{BLANKS}]*)*")
# The model computes in float32: what it can not hold is as good as infinite. Also keeps every square finite in float64.
MAX_MAGNITUDE = 3.4028234663852886e38


def reason_against(cell: str) -> str | None:
    """Why a cell can not be used (`missing`, `non_finite`, `not_a_number`), None for a finite number."""
    text = cell.strip(BLANKS)
    if NUMBER.fullmatch(text):
        return None if abs(float(text)) <= MAX_MAGNITUDE else "non_finite"
    text = text.casefold()
    return "missing" if text in MISSING else "non_finite" if text in NON_FINITE else "not_a_number"


def kind_of(cell: str, delimiter: str) -> str:
    """`number`, with a unit or without, `missing`, `word`, or `digits` for text that begins like a number: a date."""
    text = cell.strip(BLANKS)
    reason = reason_against(text)
    if reason == "not_a_number" and (parts := split_unit(text))[1]:
        text, reason = parts[0], reason_against(parts[0])
    if reason in {None, "non_finite"} or (delimiter != "," and COMMA_NUMBER.fullmatch(text)):
        return "number"
    if reason == "missing":
        return "missing"
    return "digits" if text.lstrip("+-.")[:1].isdecimal() else "word"


def split_unit(cell: str) -> tuple[str, str]:
    """A cell without its unit, and the unit; "" where it has none of UNITS."""
    found = WITH_UNIT.fullmatch(cell.strip(BLANKS))
    return (found[1], found[2] or found[3]) if found else (cell, "")


def without_unit(cell: str, unit: str) -> str:
    """The number of a cell in a column of `unit`, which may be ""; NO_SUCH_UNIT where the cell has another."""
    number, found = split_unit(cell)
    return number if found == unit or reason_against(number) in {"missing", "non_finite"} else NO_SUCH_UNIT


class DecimalMark:
    """The decimal mark of one file: "." or ",", or "" as long as no cell has shown it.

    A file whose fields are separated by commas has the point. In any other the first cell with a mark decides, and a
    cell with the other mark is an error: 1,500 may be one and a half or fifteen hundred.
    """

    def __init__(self, delimiter: str) -> None:
        self.mark = "." if delimiter == "," else ""
        self._is_open = delimiter != ","

    def needs_cells(self, data: bytes) -> bool:
        """Whether a block must be looked at cell by cell, since it may decide the mark or contradict it."""
        if not self._is_open or self.mark == ".":  # a comma is then no number, and the parser stops at it
            return False
        return b"." in data or (not self.mark and b"," in data)

    def learn(self, cells: Sequence[str], line: int, columns: Sequence[int]) -> None:
        """Takes cells of one row as evidence. Raises DataError malformed when it contradicts earlier evidence."""
        for column, cell in zip(columns, cells, strict=True):
            text = cell.strip(BLANKS)
            mark = _mark_of(text) if self._is_open else ""
            if mark == "both" or (mark and self.mark and mark != self.mark):
                raise _two_marks(text, line, column)
            self.mark = mark or self.mark

    def numbers_of(self, cells: Sequence[str], line: int, columns: Sequence[int]) -> list[float] | None:
        """The cells of one row as numbers; None if one of them is none or is not finite. `columns` count from 1."""
        joined = "\n".join(cells)
        if self._is_open and (not self.mark or _OTHER_MARK[self.mark] in joined):
            self.learn(cells, line, columns)
        joined = self.pointed(joined)
        if not NUMBER_ROW.fullmatch(joined):
            return None
        values = [float(text) for text in joined.split("\n")]
        return values if len(values) == len(cells) and max(map(abs, values)) <= MAX_MAGNITUDE else None

    def pointed(self, text: str) -> str:
        """Cells of text with the decimal point."""
        return text.replace(",", ".") if self.mark == "," else text


_OTHER_MARK = {".": ",", ",": "."}


def _two_marks(text: str, line: int, column: int) -> DataError:
    return DataError(
        "malformed",
        f"{text!r}: decimal comma and decimal point occur in one file",
        line=line,
        column=column,
        remedy="write all numbers with a decimal point and without separators of thousands",
    )


def _mark_of(text: str) -> str:
    if COMMA_NUMBER.fullmatch(text):
        return ","
    if BOTH_MARKS.fullmatch(text):
        return "both"
    return "." if "." in text and NUMBER.fullmatch(text) else ""
