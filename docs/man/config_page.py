"""The generated parts of retraind.yaml(5): config.py's types, ranges and restarts with the words of the shipped file.

The comments of etc/retraind.yaml are what operators are told of a key, and its values are the defaults; the suite
holds both against config.py, so they are read here and said nowhere else. A new key needs nothing in this module.
"""

import inspect
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import roff
from retraind import config_file
from retraind.config import RESTART_KEYS, ColumnKind, Config, Section

NAMES = frozenset(config_file.all_keys())
_BASES = {
    int: "whole number", float: "number", bool: "true or false", Path: "path", str: "text",
    tuple[str, ...]: "list of words",
    dict[str, ColumnKind]: f"names, each with one of {', '.join(typing.get_args(ColumnKind))}",
}  # fmt: skip


class SourceError(Exception):
    """The shipped file and config.py do not fit together."""


@dataclass
class Shipped:
    """The shipped file as text: its head, and for each dotted key the comment above it and the value beside it."""

    head: list[str] = field(default_factory=list)
    comments: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)


def read_shipped(path: Path) -> Shipped:
    """The file's comments and values. Raises SourceError for a line of another form, and for a key that is missing."""
    shipped, section, comment = Shipped(), "", list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip()
        if not text and comment and not shipped.head:
            shipped.head = [" ".join(part.split()) for part in "\n".join(comment).split("\n\n")]
        if not text:
            comment = []
        elif text.startswith("#"):
            comment.append(text[1:].strip())
        elif match := re.fullmatch(r"( *)(\w+):(?: +(.+))?", line):
            section = section if match[1] else match[2]
            key = f"{section}.{match[2]}" if match[1] else section
            if match[3]:
                shipped.comments[key], shipped.values[key] = " ".join(comment), match[3]
            comment = []
        else:
            raise SourceError(f"{path}:{number}: expected a comment or `key: value`, found {line!r}")
    if wrong := set(shipped.values) ^ NAMES:
        raise SourceError(f"{path}: keys that only it or only config.py has: {', '.join(sorted(wrong))}")
    return shipped


def parts(path: Path) -> dict[str, str]:
    """What the template may ask for; `path` is etc/retraind.yaml."""
    shipped = read_shipped(path)
    # The first sentence is about the shipped file itself.
    head = [re.sub(r"^retraind: .*?\. ", "", shipped.head[0]), *shipped.head[1:]]
    return {
        "RULES": "\n.PP\n".join(roff.prose(paragraph, NAMES) for paragraph in head),
        "KEYS": "\n".join([_top_level(shipped), *_sections(shipped)]),
        **{f"default:{key}": roff.escape(value) for key, value in shipped.values.items()},
    }


def _types(section: type[Section]) -> dict[str, typing.Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(section)}


def _is_section(kind: typing.Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _top_level(shipped: Shipped) -> str:
    keys = {name: kind for name, kind in _types(Config).items() if not _is_section(kind)}
    return "\n".join([".SS Without a section", *(_key(name, kind, shipped) for name, kind in keys.items())])


def _sections(shipped: Shipped) -> list[str]:
    found = []
    for name, section in _types(Config).items():
        if _is_section(section):
            entries = [_key(f"{name}.{key}", kind, shipped) for key, kind in _types(section).items()]
            intro = roff.prose(inspect.getdoc(section) or "", NAMES)
            found.append("\n".join([f".SS {roff.escape(name)}", intro, *entries]))
    return found


def _key(key: str, kind: typing.Any, shipped: Shipped) -> str:
    """One key: what it may be, its default, when a change of it counts, and what it does."""
    needs_restart = key in RESTART_KEYS
    expected = expected_words(kind)
    when = "Takes effect at a RESTART." if needs_restart else "Takes effect at a reload."
    facts = "\n".join(
        [
            roff.prose(f"{expected[0].upper()}{expected[1:]}."),
            f"Default: {roff.bold(shipped.values[key])}.",
            roff.prose(when),
        ]
    )
    comment = shipped.comments[key].replace("RESTART. ", "", 1)
    return roff.entry(roff.bold(key), facts, roff.prose(comment, NAMES))


def expected_words(kind: typing.Any) -> str:
    """What a key of this type may be, in words: `whole number from 1 to 100, or null`."""
    choices, metas, base, is_optional = config_file.describe(kind)
    if choices:
        words = "one of " + ", ".join(f"`{choice}`" for choice in choices)
    else:
        words = _BASES.get(typing.cast("type", base), "value") + _limits(metas)
    return words + (", or `null`" if is_optional else "")


def _limits(metas: list[msgspec.Meta]) -> str:
    """The ranges of a value. A number's are written as the complaint about a wrong one writes them."""
    limits = {
        name: getattr(meta, name)
        for meta in metas
        for name in ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern", "description")
        if getattr(meta, name) is not None
    }
    words = []
    if "ge" in limits and "le" in limits:
        words.append(f" from {config_file.written(limits.pop('ge'))} to {config_file.written(limits.pop('le'))}")
    told = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "multiple_of": "a multiple of"}
    words += [f", {text} {config_file.written(limits[name])}" for name, text in told.items() if name in limits]
    for name, text in (("min_length", "at least"), ("max_length", "at most")):
        words += [f", {text} {limits[name]} characters"] if name in limits else []
    if "pattern" in limits:
        words.append(f": {limits.get('description', 'as ' + limits['pattern'])}")
    return "".join(words)
