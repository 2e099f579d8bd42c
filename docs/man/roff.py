"""Text as roff: what is escaped, which words are set in bold or italics, how a paragraph and an entry are written.

Knows man(7) and nothing of retraind. A page is ASCII, also once it is rendered for a terminal: what is copied from it
must work in a shell, and what is searched in it must be found, so each hyphen is a minus and each quote is straight.
"""

import re
import textwrap
from collections.abc import Collection, Iterable

_ESCAPES = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", '"': "\\(dq", "^": "\\(ha", "~": "\\(ti"}
# What the sources' texts mark, or what can be told by its form. The order decides: the first that fits is taken.
_MARKS = re.compile(
    r"`(?P<code>[^`]+)`"
    r"|(?P<option>(?<![\w-])--[a-z][a-z-]+)"
    r"|(?P<place>(?:<[\w.]+>[\w./-]*)+)"
    r"|(?P<path>(?<![\w/<>.])/[\w./-]*[\w/]|(?<![\w/<>.-])[a-z]+/(?!\w))"
    r"|(?P<signal>\bSIG[A-Z]+\b|\bRESTART\b)"
    r"|(?P<name>(?<![\w./-])[a-z]+\.[a-z_]+(?!\w))"
)


def escape(text: str) -> str:
    """Text of which each character is shown as it is."""
    return "".join(_ESCAPES.get(char, char) if char.isascii() else f"\\[u{ord(char):04X}]" for char in text)


def bold(text: str) -> str:
    """Words that are typed as they stand."""
    return rf"\fB{escape(text)}\fP"


def italic(text: str) -> str:
    """Words that stand for others, and paths."""
    return rf"\fI{escape(text)}\fP"


def code(text: str) -> str:
    """A command or a value as it is typed; words in capitals and in angle brackets stand for others."""
    parts = re.split(r"(\b[A-Z]{2,}\b|<[\w.]+>)", text)
    return "".join(italic(part.strip("<>")) if at % 2 else bold(part) for at, part in enumerate(parts) if part)


def prose(text: str, names: Collection[str] = ()) -> str:
    """One paragraph of a source's text, in lines of its own that end with the sentence. `names` are set in bold."""

    def set_mark(match: re.Match[str]) -> str:
        kind, found = str(match.lastgroup), match[0]
        if kind == "code":
            return code(match["code"])
        if kind == "place":
            parts = re.split(r"<([\w.]+)>", found)
            return "".join(italic(part) if at % 2 else escape(part) for at, part in enumerate(parts))
        if kind == "path":
            return italic(found)
        return bold(found) if kind != "name" or found in names else escape(found)

    lines: list[str] = []
    for sentence in re.split(r"(?<=[\w)`\"][.:])\s+(?=[\"A-Z`0-9])", " ".join(text.split())):
        pieces, end = [], 0
        for match in _MARKS.finditer(sentence):
            pieces += [escape(sentence[end : match.start()]), set_mark(match)]
            end = match.end()
        lines += textwrap.wrap(
            "".join([*pieces, escape(sentence[end:])]), 78, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(_guarded(line) for line in lines)


def _guarded(line: str) -> str:
    """A line of text that can not be taken for a macro."""
    return rf"\&{line}" if line[:1] in (".", "'") else line


def example(lines: Iterable[str]) -> str:
    """Lines as they are typed."""
    return "\n".join([".IP", ".EX", *(_guarded(escape(line)) for line in lines), ".EE"])


def entry(tag: str, *paragraphs: str) -> str:
    """A tag, which is roff already, with paragraphs set in below it."""
    first, *more = [paragraph for paragraph in paragraphs if paragraph] or [r"\&"]
    # An example brings its own set-in paragraph.
    rest = [text if text.startswith(".IP") else f".IP\n{text}" for text in more]
    return "\n".join([".TP", _guarded(tag), first, *rest])
