"""JSON bytes to typed values, with one error for everything that is wrong with them.

msgspec says DecodeError or ValidationError, but its older versions let UnicodeDecodeError through for bytes that are
not UTF-8, which a disk fault or a strange worker can bring. No I/O.
"""

from typing import TypeVar

import msgspec

T = TypeVar("T")


class Malformed(ValueError):
    """The bytes are not JSON, or not of the type that was asked for."""


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """A value of type `kind`. Raises Malformed."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from error
