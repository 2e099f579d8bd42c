"""Which text is time series, and in which of their formats: by what it begins with, never by the file's name.

Owns the order of the questions. Reads nothing beyond the head that it is given. Raises what the reader that it chooses
raises.
"""

from retraind.config import DataConfig
from retraind.worker.readers import gpus
from retraind.worker.readers.exposition import is_exposition, read_exposition
from retraind.worker.readers.jsonarray import JsonArrayReader
from retraind.worker.readers.lineprotocol import is_line_protocol, read_line_protocol
from retraind.worker.readers.lines import UTF8_BOM
from retraind.worker.readers.longtable import layout_of, read_long_table
from retraind.worker.readers.matrix import is_answer, read_matrix
from retraind.worker.readers.metricstream import is_metric_stream, read_metric_stream
from retraind.worker.readers.pivot import SeriesReader
from retraind.worker.readers.sadf import is_report, read_report
from retraind.worker.readers.source import Source


def series_reader(source: Source, limits: DataConfig, head: bytes) -> SeriesReader | JsonArrayReader | None:
    """The reader for a file that begins with `head`, text of which its end may be missing; None for other text."""
    text = head.removeprefix(UTF8_BOM).decode("utf-8", "surrogateescape").lstrip()
    if text.startswith("["):
        return JsonArrayReader(source, limits)
    if text.startswith("{"):
        return _document_reader(source, limits, text)
    lines = _whole_lines(text)
    if not lines:
        return None
    if is_exposition(lines):
        return read_exposition(source, limits)
    if is_line_protocol(lines):
        return read_line_protocol(source, limits)
    if log := gpus.layout_of(lines):
        return gpus.read_gpus(source, limits, log)
    if layout := layout_of(lines):
        return read_long_table(source, limits, layout)
    return None


def _document_reader(source: Source, limits: DataConfig, text: str) -> SeriesReader | None:
    if is_answer(text):
        return read_matrix(source, limits)
    if is_report(text):
        return read_report(source, limits)
    if is_metric_stream(text):
        return read_metric_stream(source, limits, text)
    return None


def _whole_lines(text: str) -> list[str]:
    """The lines that are not blank, without the last, which may be cut; that one alone where it is the only one."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return [line.strip() for line in lines[:-1] if line.strip()] or [line for line in lines if line.strip()]
