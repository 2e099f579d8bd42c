"""Samples of time series as they are met in a file: (series, time, value), in four flat arrays.

Owns the bound of their memory: 28 bytes each and MAX_SAMPLES of them, since which series there are and which stamps
are one row is known at the end of the file only. Raises DataError too_large, too_many_columns, malformed. Never orders
or judges them: that is `pivot`.
"""

from array import array
from collections.abc import Mapping

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.printable import printable
from retraind.worker.readers.columns import MAX_NAMES_BYTES, check_names
from retraind.worker.readers.numbers import NON_FINITE, NUMBER

# Half a GB as they are held, and one GB at the peak, while they are put in order.
MAX_SAMPLES = 2**24
NOT_A_NUMBER = frozenset({"nan", "-nan", "+nan"})
ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Samples:
    """All samples of a file. A series has numbers or text, never both."""

    def __init__(self, limits: DataConfig) -> None:
        self._limits = limits
        self._names_bytes = 0
        self.codes: dict[str, int] = {}
        self.text_names: set[str] = set()
        self.instants = array("q")
        self.series = array("i")
        self.values = array("d")
        self.lines = array("q")

    def code(self, name: str, line: int) -> int:
        """The number of a series of numbers, new or known."""
        if (code := self.codes.get(name)) is not None:
            return code
        if name in self.text_names:
            raise _two_types(name, line)
        self._count_name(name)
        self.codes[name] = len(self.codes)
        return len(self.codes) - 1

    def add(self, code: int, instant: int, value: float, line: int) -> None:
        """One sample; NaN is a sample without a value. `line` is where it stands, 0 where nobody knows."""
        if len(self.instants) >= MAX_SAMPLES:
            raise DataError(
                "too_large",
                f"the file holds more than {MAX_SAMPLES:,} samples of time series, which must be held in memory",
                line=line or None,
                remedy="write shorter spans of time into a file, or one row a time stamp as CSV",
            )
        self.instants.append(instant)
        self.series.append(code)
        self.values.append(value)
        self.lines.append(line)

    def add_text(self, name: str, line: int) -> None:
        """A series whose value is no number: it is listed and not used."""
        if name in self.text_names:
            return
        if name in self.codes:
            raise _two_types(name, line)
        self._count_name(name)
        self.text_names.add(name)

    def _count_name(self, name: str) -> None:
        self._names_bytes += len(name.encode("utf-8", "replace"))
        num_names = len(self.codes) + len(self.text_names) + 1
        if num_names > self._limits.max_columns or self._names_bytes > MAX_NAMES_BYTES:
            check_names([printable(known) for known in (*self.codes, *self.text_names, name)], self._limits)


def series_name(metric: str, labels: Mapping[str, str]) -> str:
    """The name of a series as Prometheus writes it, labels by name. A label without a value is none."""
    pairs = ",".join(f'{key}="{value.translate(ESCAPED)}"' for key, value in sorted(labels.items()) if value)
    return f"{metric}{{{pairs}}}" if pairs else metric


def number_of(text: str) -> float:
    """A number, NaN or an infinity, as monitoring systems write them. Raises ValueError for all else."""
    if NUMBER.fullmatch(text):
        return float(text)
    word = text.casefold()
    if word in NOT_A_NUMBER:
        return float("nan")
    if word in NON_FINITE and "#" not in word:
        return float(word)
    raise ValueError(f"{text!r:.60} is no number")


def _two_types(name: str, line: int) -> DataError:
    return DataError(
        "malformed",
        f"the series {printable(name[:80])} has a number in one place and text in another",
        line=line or None,
        remedy="give the two series names of their own",
    )
