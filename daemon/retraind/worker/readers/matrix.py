"""The answer of Prometheus's API to a range query (`resultType: matrix`) to rows: a series is a column.

Owns the form of that answer. Prometheus evaluates all series at the same times, so only equal stamps are one row.
Series of native histograms are listed and not used. Never fetches anything. Raises DataError unsupported_format for
other answers, malformed, no_rows, and what `document` raises. Format: "Range queries" of the HTTP API.
"""

import re

import msgspec

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.printable import printable
from retraind.worker.readers.document import decode, read_document
from retraind.worker.readers.pivot import SeriesReader
from retraind.worker.readers.samples import Samples, number_of, series_name
from retraind.worker.readers.source import Source
from retraind.worker.readers.timestamps import MAX_INSTANT

# How such an answer begins, keys in the order of Prometheus and of its kin, or sorted.
BEGINNING = re.compile(
    r'\{\s*(?:"(?:status|isPartial)"\s*:\s*(?:"\w+"|\w+)\s*,\s*)*'
    r'(?:"data"\s*:\s*\{\s*"(?:resultType|result)"\s*:|"errorType"\s*:\s*"\w+"\s*,\s*"error"\s*:)'
)
REMEDY = "ask /api/v1/query_range with start, end and step"
SMALLER = "ask for a shorter range, or for fewer series, with each answer in a file of its own"


class _Data(msgspec.Struct):
    result_type: str = msgspec.field(name="resultType")
    result: msgspec.Raw


class _Answer(msgspec.Struct):
    status: str = ""
    data: _Data | None = None
    error: str = ""


class _Series(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]] = []


def is_answer(text: str) -> bool:
    """Whether a document begins as an answer of the API."""
    return bool(BEGINNING.match(text))


def read_matrix(source: Source, limits: DataConfig) -> SeriesReader:
    """Holds the document, and decodes it series by series."""
    answer = decode(read_document(source, SMALLER), _Answer)
    if answer.data is None or answer.status == "error":
        raise DataError(
            "unsupported_format",
            f"the file is an error of Prometheus's API: {printable(answer.error[:200])}",
            remedy=REMEDY,
        )
    if answer.data.result_type != "matrix":
        raise DataError(
            "unsupported_format",
            f"the file is an answer of Prometheus's API with resultType {printable(answer.data.result_type[:40])}, "
            "which has no rows in time; matrix is expected",
            remedy=REMEDY,
        )
    samples = Samples(limits)
    for index, part in enumerate(decode(answer.data.result, list[msgspec.Raw])):
        _add(decode(part, _Series, f"result {index}"), index, samples)
        source.read(0)  # reads nothing, but says that we are alive
    return SeriesReader("prometheus-matrix", source, samples, exact=True)


def _add(series: _Series, index: int, samples: Samples) -> None:
    metric = series.metric.pop("__name__", "")
    name = series_name(metric, series.metric) or "{}"
    if not series.values:
        samples.add_text(name, 0)
        return
    code = samples.code(name, 0)
    for seconds, text in series.values:
        try:
            samples.add(code, _instant(seconds), number_of(text), 0)
        except ValueError as error:
            raise DataError(
                "malformed",
                f"result {index}, {printable(name[:80])}: {error}",
                remedy=f"{REMEDY}, and keep the answer as it is",
            ) from error


def _instant(seconds: float) -> int:
    """The API's times are seconds with three decimals."""
    if not abs(seconds) < MAX_INSTANT / 1e9:
        raise ValueError(f"the time stamp {seconds} is out of range")
    return round(seconds * 1000) * 10**6
