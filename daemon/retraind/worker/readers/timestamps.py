"""Time stamps in text to whole nanoseconds since 1970, for the readers of series.

Owns the rule for numbers: their magnitude tells the unit (below 1e11 seconds, below 1e14 milliseconds, below 1e17
microseconds, else nanoseconds), and one file has one unit. Never guesses at dates: ISO 8601 or nothing. A time without
a zone counts as UTC. Raises ValueError with words for a message; the reader that calls knows the line.
"""

import re
from datetime import UTC, datetime

from retraind.worker.readers.numbers import NUMBER

# Upper bounds of the magnitude, the unit's name and its nanoseconds. 1e11 s is the year 5138, 1e11 ms is 1973.
UNITS = ((10**11, "seconds", 10**9), (10**14, "milliseconds", 10**6), (10**17, "microseconds", 10**3))
NANOSECONDS = ("nanoseconds", 1)
# Differences of two must fit into 64 bits: the years 1824 to 2116.
MAX_INSTANT = 2**62
INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_TIME = r"[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?"
ISO_8601 = re.compile(rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}(?:[T ]{_TIME}(?: ?Z|[+-][0-9]{{2}}:?[0-9]{{2}})?)?")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock:
    """The time stamps of one file, which must all be written in one way."""

    def __init__(self) -> None:
        self._kind = ""
        self._last = ("", 0)  # rows of many series repeat one stamp

    def instant(self, text: str) -> int:
        """Nanoseconds since 1970."""
        if text == self._last[0]:
            return self._last[1]
        kind, instant = _from_number(text) if NUMBER.fullmatch(text) else _from_date(text)
        if self._kind not in {"", kind}:
            raise ValueError(f"the time stamp {text!r:.60} is in {kind}, the ones before it are in {self._kind}")
        if abs(instant) > MAX_INSTANT:
            raise ValueError(f"the time stamp {text!r:.60} is out of range")
        self._kind, self._last = kind, (text, instant)
        return instant


def _from_number(text: str) -> tuple[str, int]:
    number = int(text) if INTEGER.fullmatch(text) else float(text)
    if abs(number) > MAX_INSTANT:  # infinite, too
        raise ValueError(f"the time stamp {text!r:.60} is out of range")
    kind, unit = next(((kind, unit) for bound, kind, unit in UNITS if abs(number) < bound), NANOSECONDS)
    return kind, round(number * unit)


def _from_date(text: str) -> tuple[str, int]:
    if not ISO_8601.fullmatch(text):
        raise ValueError(f"{text!r:.60} is no time stamp: a number since 1970 or ISO 8601 is expected")
    try:
        # Python takes at most six digits of a fraction and drops the rest.
        moment = datetime.fromisoformat(text.replace(",", ".").replace(" Z", "Z"))
    except ValueError as error:
        raise ValueError(f"{text!r:.60} is no time stamp: {error}") from error
    kind = "dates without a zone" if moment.tzinfo is None else "dates with a zone"
    since = (moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment) - EPOCH
    return kind, ((since.days * 86_400 + since.seconds) * 10**6 + since.microseconds) * 1000
