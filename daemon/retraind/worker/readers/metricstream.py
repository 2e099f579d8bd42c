"""A CloudWatch metric stream in the output format JSON, as Firehose delivers it or stores it, to rows.

Owns the two forms, an envelope of records in base64 (`{"requestId": ..., "records": [{"data": ...}]}`) or the lines
themselves, and the names: `account/region/namespace/metric/statistic{dimension="value"}`, one series for each statistic
of a sample (min, max, sum, count, percentiles). The unit is a word of its producer's and is not used. The other output
formats are protocol buffers and are refused. Raises DataError malformed, truncated, unsupported_format, no_rows.
"""

import re
from base64 import b64decode
from collections.abc import Iterator

import msgspec

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.readers.document import decode, read_document
from retraind.worker.readers.lines import numbered_lines
from retraind.worker.readers.pivot import SeriesReader
from retraind.worker.readers.samples import Samples, series_name
from retraind.worker.readers.source import Source
from retraind.worker.readers.timestamps import MAX_INSTANT

ENVELOPE = re.compile(r'\{\s*"requestId"\s*:\s*"[^"]*"\s*,\s*"timestamp"\s*:\s*[0-9]+\s*,\s*"records"\s*:\s*\[')
LINE = re.compile(r'\{\s*"metric_stream_name"\s*:')
BLOCK_BYTES = 2**20
FORMAT = "cloudwatch"
REMEDY = "let the metric stream write the output format JSON"


class _Record(msgspec.Struct):
    data: str


class _Envelope(msgspec.Struct):
    records: list[_Record]


class _Sample(msgspec.Struct):
    account_id: str
    region: str
    namespace: str
    metric_name: str
    timestamp: int  # in milliseconds
    value: dict[str, float | None]
    dimensions: dict[str, str] = {}


def is_metric_stream(text: str) -> bool:
    """Whether a file begins as a delivery, or as the lines of one."""
    return bool(ENVELOPE.match(text) or LINE.match(text))


def read_metric_stream(source: Source, limits: DataConfig, text: str) -> SeriesReader:
    """Reads all of it: which series there are is known at the end. `text` is how it begins."""
    samples = Samples(limits)
    if ENVELOPE.match(text):
        envelope = decode(read_document(source, "store fewer records in a file"), _Envelope)
        for index, record in enumerate(envelope.records):
            for line in _lines_of(record, index):
                _add(line, 0, f"record {index}", samples)
            source.read(0)  # reads nothing, since all was read, but says that we are alive
    else:
        for text_line, number, is_cut in numbered_lines(source, BLOCK_BYTES, limits.max_line_bytes):
            # A last line without its end may have been cut within its value, and is left out as elsewhere.
            if text_line and not (is_cut and not text_line.endswith("}")):
                _add(text_line.encode("utf-8", "surrogateescape"), number, "the line", samples)
    return SeriesReader(FORMAT, source, samples)


def _lines_of(record: _Record, index: int) -> Iterator[bytes]:
    try:
        data = b64decode(record.data, validate=True)
    except ValueError as error:
        raise DataError(
            "malformed", f"record {index} is not base64: {error}", remedy="store the delivery as it came"
        ) from error
    if not data.lstrip().startswith(b"{"):
        raise DataError(
            "unsupported_format",
            f"record {index} is not JSON, as the OpenTelemetry formats of a metric stream are not",
            remedy=REMEDY,
        )
    yield from (line for line in data.split(b"\n") if line.strip())


def _add(line: bytes, number: int, what: str, samples: Samples) -> None:
    try:
        sample = decode(line, _Sample, what)
    except DataError as error:
        raise DataError(error.code, error.message, line=number or None, remedy=REMEDY) from error
    if abs(sample.timestamp) > MAX_INSTANT // 10**6:
        raise DataError(
            "malformed",
            f"{what}: the time stamp {sample.timestamp} is out of range",
            line=number or None,
            remedy=REMEDY,
        )
    owner = f"{sample.account_id}/{sample.region}/{sample.namespace}/{sample.metric_name}"
    for statistic, value in sample.value.items():
        code = samples.code(series_name(f"{owner}/{statistic}", sample.dimensions), number)
        samples.add(code, sample.timestamp * 10**6, float("nan") if value is None else value, number)
