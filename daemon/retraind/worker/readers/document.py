"""One JSON document, held whole: what reading a document costs, and where in it something is wrong.

Owns the bound of its size, and the place of a mistake. JSON can not be cut into blocks without reading it, so the
document is kept as bytes, up to MAX_DOCUMENT_BYTES, and its parts are decoded one after the other. Raises DataError
too_large, truncated, malformed.
"""

import re
from typing import TypeVar

import msgspec

from retraind.errors import DataError
from retraind.worker.readers.lines import UTF8_BOM
from retraind.worker.readers.source import Source

# Twice this at the peak, while the parts that were read are put together.
MAX_DOCUMENT_BYTES = 2**27
BYTE = re.compile(r"\(byte ([0-9]+)\)")

T = TypeVar("T")


def read_document(source: Source, remedy: str) -> bytes:
    """The bytes of the whole file. `remedy` says how to write it in a form that can be streamed."""
    data = source.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DataError(
            "too_large",
            f"the JSON document has more than {MAX_DOCUMENT_BYTES:,} bytes, and must be held in memory",
            remedy=remedy,
        )
    return data.removeprefix(UTF8_BOM)


def decode(data: bytes | msgspec.Raw, kind: type[T], what: str = "the document") -> T:
    """The document, or a part of it, as the type that it must have."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if "truncated" in str(error):
            raise DataError(
                "truncated", f"{what} ends too early", remedy="the copy was cut short: copy the file again"
            ) from error
        line, column = _place(bytes(data), str(error))
        raise DataError(
            "malformed",
            f"{what} can not be read: {error}",
            line=line,
            column=column,
            remedy="write it anew; NaN and Infinity are no JSON, and null is a missing value",
        ) from error


def _place(data: bytes, message: str) -> tuple[int | None, int | None]:
    """Line and column of the byte that a message names."""
    if not (match := BYTE.search(message)):
        return None, None
    before = data[: int(match[1])]
    return before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
