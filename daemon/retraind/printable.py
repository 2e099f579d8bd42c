"""Names and cells from outside as text that any log, terminal or JSON document can hold. Pure."""


def printable(text: str | bytes) -> str:
    """The text on one line: bytes that are no UTF-8, and characters that are not printable, stand as escapes."""
    try:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
        decoded = data.decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # a lone surrogate, from a JSON escape
        decoded = str(text)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in decoded)
