r"""Influx line protocol to rows: each numeric field is a series `measurement,tags.field`, tags in order of name.

Owns the grammar of a line: `measurement,tag=value field=1.5,other=2i 1717163790675899148`, blanks, commas and equals
signs escaped by a backslash, text in quotes. Fields of text and of true and false are listed and not used. Each line
needs a time stamp, without which nobody can tell its row; its magnitude tells the precision (`timestamps`). A last line
without a line end may be cut, and is not used. Raises DataError malformed, no_rows.
"""

import re

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.printable import printable
from retraind.worker.readers.lines import numbered_lines
from retraind.worker.readers.numbers import NUMBER
from retraind.worker.readers.pivot import SeriesReader
from retraind.worker.readers.samples import Samples
from retraind.worker.readers.source import Source
from retraind.worker.readers.timestamps import Clock

BLOCK_BYTES = 2**20
_KEY = r"(?:[^,= \\]|\\.)+"
_MEASUREMENT = r"(?:[^, \\#]|\\.)(?:[^, \\]|\\.)*"
_VALUE = r'(?:"(?:[^"\\]|\\.)*"|[^,= "]+)'
_FIELD = rf"{_KEY}={_VALUE}"
LINE = re.compile(
    rf"({_MEASUREMENT})((?:,{_KEY}={_KEY})*)[ ]+({_FIELD}(?:,{_FIELD})*)(?:[ ]+(-?[0-9]+))?[ \r]*", re.DOTALL
)
BEGINNING = re.compile(rf"{_MEASUREMENT}(?:,{_KEY}={_KEY})*[ ]+{_KEY}=({_VALUE})(?:[ ,].*)?", re.DOTALL)
TAG = re.compile(rf",({_KEY})=({_KEY})", re.DOTALL)
FIELD = re.compile(rf"({_KEY})=({_VALUE})", re.DOTALL)
INTEGER = re.compile(r"[+-]?[0-9]+[iu]")
WORDS = frozenset({"t", "T", "true", "True", "TRUE", "f", "F", "false", "False", "FALSE"})


def is_line_protocol(lines: list[str]) -> bool:
    """Whether a file begins as line protocol: its first lines have a measurement, and a field whose value is one."""
    points = [line for line in lines if not line.startswith("#")][:2]
    matches = [BEGINNING.fullmatch(line) for line in points]
    return bool(matches) and all(match and _is_value(match[1]) for match in matches)


def _is_value(text: str) -> bool:
    return text.startswith('"') or text in WORDS or bool(NUMBER.fullmatch(text) or INTEGER.fullmatch(text))


def read_line_protocol(source: Source, limits: DataConfig) -> SeriesReader:
    """Reads all of it: which series there are is known at the end."""
    samples = Samples(limits)
    points = _Points(samples, limits.max_columns)
    for text, number, is_cut in numbered_lines(source, BLOCK_BYTES, limits.max_line_bytes):
        if text and not text.startswith("#") and not is_cut:
            points.add(text, number)
    return SeriesReader("influx", source, samples)


class _Points:
    """Splits points into samples."""

    def __init__(self, samples: Samples, max_series: int) -> None:
        self._samples = samples
        self._clock = Clock()
        self._prefixes: dict[str, str] = {}
        self._max_spellings = 2 * max_series

    def add(self, text: str, line: int) -> None:
        match = LINE.fullmatch(text)
        if match is None:
            raise _malformed(f"{text!r:.80} is no line of Influx line protocol", line)
        if match[4] is None:
            raise _malformed("the line has no time stamp, so nobody can tell its row", line)
        try:
            instant = self._clock.instant(match[4])
        except ValueError as error:
            raise _malformed(str(error), line) from error
        prefix = self._prefix(match[1], match[2], line)
        for key, value in FIELD.findall(match[3]):
            self._add_field(f"{prefix}.{_unescaped(key)}", value, instant, line)

    def _prefix(self, measurement: str, tags: str, line: int) -> str:
        """The measurement and its tags: lines of one series may have them in different orders."""
        if (prefix := self._prefixes.get(measurement + tags)) is not None:
            return prefix
        pairs = TAG.findall(tags)
        if len(dict(pairs)) < len(pairs):
            raise _malformed("a tag comes twice in one line", line)
        if len(self._prefixes) >= self._max_spellings:
            self._prefixes.clear()
        prefix = ",".join([_unescaped(measurement), *(f"{_unescaped(k)}={_unescaped(v)}" for k, v in sorted(pairs))])
        self._prefixes[measurement + tags] = prefix
        return prefix

    def _add_field(self, name: str, value: str, instant: int, line: int) -> None:
        if value.startswith('"') or value in WORDS:
            self._samples.add_text(name, line)
            return
        number = value[:-1] if INTEGER.fullmatch(value) else value
        if not NUMBER.fullmatch(number):
            raise _malformed(
                f"the field {printable(name[:80])} has the value {value!r:.60}, which is none of Influx", line
            )
        self._samples.add(self._samples.code(name, line), instant, float(number), line)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([,= \\])", r"\1", text)


def _malformed(message: str, line: int) -> DataError:
    return DataError(
        "malformed",
        message,
        line=line,
        remedy="write measurement,tag=value field=number time-stamp, one point a line",
    )
