"""A JSON array of objects to rows: what JSON lines are, in one document.

Owns the way from the one to the other: each object becomes a line, so that `jsonlines` judges it. A problem's line is
the number of the object. Raises DataError no_rows, what `document` raises, and what `jsonlines` raises.
"""

import msgspec

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.readers.document import decode, read_document
from retraind.worker.readers.jsonlines import JsonLinesReader
from retraind.worker.readers.source import Source

REMEDY = "write one object a line: jq -c '.[]'"


class JsonArrayReader(JsonLinesReader):
    """Reads one array, held as bytes."""

    format = "json"

    def __init__(self, source: Source, limits: DataConfig) -> None:
        objects = decode(read_document(source, REMEDY), list[msgspec.Raw], "the array")
        if not objects:
            raise DataError("no_rows", "the array is empty", remedy="write an object a row")
        super().__init__(_Lines(objects, source), limits)


class _Lines:
    """The objects as the content of a file of JSON lines."""

    def __init__(self, objects: list[msgspec.Raw], source: Source) -> None:
        self._objects = iter(objects)
        self._source = source

    def read(self, size: int) -> bytes:
        """Whole lines, `size` bytes or a little more; nothing at the end."""
        self._source.read(0)  # reads nothing, since all was read, but says that we are alive
        lines, num_bytes = [], 0
        for part in self._objects:
            # Line ends stand between the tokens of JSON only, never in its strings.
            lines.append(bytes(part).replace(b"\r", b" ").replace(b"\n", b" ") + b"\n")
            num_bytes += len(lines[-1])
            if num_bytes >= size:
                break
        return b"".join(lines)
