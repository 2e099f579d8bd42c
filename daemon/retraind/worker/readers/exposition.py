"""Prometheus and OpenMetrics text to rows: a sample is a cell, a scrape is a row, a series is a column.

Samples with time stamps are put on rows by time. Without them a scrape ends with `# EOF`, or where its first series
comes again; any other series that comes twice in a scrape is refused, since rows would then be mixed. Histograms and
summaries are the series that they are written as; exemplars and comments are not used. A last line without a line end
may be cut, and is not used. Never fetches anything. Raises DataError malformed, no_rows. Formats: Prometheus text
0.0.4 and OpenMetrics 1.0, read by one pattern a line, so that a line has its place in an error and memory is bounded.
"""

import re

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.printable import printable
from retraind.worker.readers.lines import numbered_lines
from retraind.worker.readers.pivot import SeriesReader
from retraind.worker.readers.samples import Samples, number_of, series_name
from retraind.worker.readers.source import Source
from retraind.worker.readers.timestamps import Clock

BLOCK_BYTES = 2**20
# Possessive throughout: a line of a million blanks must not take a million times as long as one of two.
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*+[ \t]*+=[ \t]*+"(?:[^"\\]|\\.)*+"[ \t]*+'
SAMPLE = re.compile(
    rf"({_NAME})[ \t]*+(?:\{{[ \t]*+((?:{_LABEL},[ \t]*+)*+(?:{_LABEL})?+)\}}[ \t]*+|(?<=[ \t]))"
    r"([^ \t#{}]++)(?:[ \t]++([0-9.eE+-]++))?+(?:[ \t]++#[ \t]*+\{.*)?"
)
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"')
COMMENT = re.compile(rf"#[ \t]*(?:(?:HELP|TYPE|UNIT)[ \t]+{_NAME}(?:[ \t].*)?|EOF)[ \t]*")
ESCAPE = re.compile(r"\\(.)")
UNESCAPED = {"n": "\n"}
HOW_TO_COLLECT = "one scrape is one row: append many to one file: while sleep 15; do curl -s URL; done >node.prom"


def is_exposition(lines: list[str]) -> bool:
    """Whether a file begins as exposition: a HELP, TYPE, UNIT or EOF, or nothing but samples and comments."""
    if COMMENT.fullmatch(lines[0]):
        return True
    samples = [line for line in lines if not line.startswith("#")]
    return bool(samples) and all(_is_sample(line) for line in samples)


def _is_sample(line: str) -> bool:
    if not (match := SAMPLE.fullmatch(line)):
        return False
    try:
        number_of(match[3])
    except ValueError:
        return False
    return True


def read_exposition(source: Source, limits: DataConfig) -> SeriesReader:
    """Reads all of it: which series there are is known at the end."""
    samples = Samples(limits)
    scrapes = _Scrapes(samples, limits.max_columns)
    for text, number, is_cut in numbered_lines(source, BLOCK_BYTES, limits.max_line_bytes):
        if text.startswith("#"):
            if text[1:].strip() == "EOF":
                scrapes.end()
        elif text and not is_cut:
            scrapes.add(text, number)
    return SeriesReader("prometheus", source, samples)


class _Scrapes:
    """Assigns samples to rows: by time stamp if the first sample has one, else by scrape."""

    def __init__(self, samples: Samples, max_series: int) -> None:
        self._samples = samples
        self._codes: dict[tuple[str, str | None], int] = {}  # by spelling: most lines repeat those of other scrapes
        self._max_spellings = 2 * max_series
        self._clock = Clock()
        self._is_timed: bool | None = None
        self._num_ended = 0
        self._first = -1
        self._seen: set[int] = set()

    def end(self) -> None:
        """What follows belongs to another scrape."""
        self._num_ended += bool(self._seen)
        self._seen.clear()

    def add(self, text: str, line: int) -> None:
        match = SAMPLE.fullmatch(text)
        if match is None:
            raise _malformed(f"{text!r:.80} is no sample of Prometheus or OpenMetrics text", line)
        metric, labels, value, stamp = match.groups()
        if self._is_timed is None:
            self._is_timed = stamp is not None
        code = self._code(metric, labels, line)
        try:
            number = number_of(value)
            instant = self._clock.instant(stamp) if self._is_timed and stamp else self._scrape(code, line)
            self._samples.add(code, instant, number, line)
        except ValueError as error:
            raise _malformed(str(error), line) from error

    def _code(self, metric: str, labels: str | None, line: int) -> int:
        if (code := self._codes.get((metric, labels))) is not None:
            return code
        pairs = [(key, ESCAPE.sub(_unescape, value)) for key, value in LABEL.findall(labels or "")]
        if len(dict(pairs)) < len(pairs):
            raise _malformed(f"{metric:.80} has a label twice", line)
        if len(self._codes) >= self._max_spellings:
            self._codes.clear()
        code = self._codes[metric, labels] = self._samples.code(series_name(metric, dict(pairs)), line)
        return code

    def _scrape(self, code: int, line: int) -> int:
        if self._is_timed:
            raise _malformed("the sample has no time stamp, but the first one in the file has", line)
        if code in self._seen:
            if code != self._first:
                name = printable(next(name for name, other in self._samples.codes.items() if other == code))
                raise _malformed(
                    f"{name:.80} comes twice in one scrape; another scrape begins with # EOF before it, or with the "
                    "first series of the one before",
                    line,
                )
            self.end()
        if not self._seen:
            self._first = code
        self._seen.add(code)
        return self._num_ended


def _unescape(match: re.Match[str]) -> str:
    return UNESCAPED.get(match[1], match[1])


def _malformed(message: str, line: int) -> DataError:
    return DataError(
        "malformed",
        message,
        line=line,
        remedy="append whole scrapes, each ended by # EOF, or give each sample a time stamp: promtool check metrics",
    )
