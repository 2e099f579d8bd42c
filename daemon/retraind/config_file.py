"""YAML -> typed sections: every problem at once, each as `file:line: key: problem (did you mean ...)`.

The only importer of yaml. Walks the node tree against the typed sections, so that each problem has its line and a
scalar is read as the type that its key has: `1e-3` is a number, `no` is text where text is expected, and two equal
keys are an error, which plain YAML loading gets wrong without a word. `load` is for the service's own configuration,
`read` for any other file of sections. Raises ConfigError, never anything else.
"""

import difflib
import math
import operator
import os
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import yaml

from retraind.config import Config, Section, get_key, split_address
from retraind.errors import ConfigError

S = typing.TypeVar("S", bound=Section)
_NO_ALIASES = "aliases, anchors and tags are not supported: write the value out"
# No key means more, and an order to a worker could not carry it.
_MAX_INT = 2**63 - 1


@dataclass
class Problems:
    """Collected while walking; in the order of the file's lines when told."""

    file: str
    known: list[str]  # every key that the file may have
    found: list[tuple[int, str]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)  # those with a problem: their values are not in the result
    lines: dict[str, int] = field(default_factory=dict)  # of every key that was given

    def add(self, line: int, key: str, problem: str) -> None:
        """What is wrong in a line."""
        self.keys.add(key)
        place = f"{self.file}:{line}: " + (f"{key}: " if key else "")
        self.found.append((line, place + problem))

    def add_at(self, key: str, problem: str) -> None:
        """What is wrong with a key, at its line, or at that of the section which lacks it."""
        around = key
        while around and around not in self.lines:
            around = around.rpartition(".")[0]
        self.add(self.lines.get(around, 1), key, problem)

    def raise_if_any(self) -> None:
        """Raises ConfigError."""
        if self.found:
            text = "\n".join(message for _, message in sorted(self.found, key=lambda item: item[0]))
            raise ConfigError("bad_config", text)


def load(path: Path | None) -> Config:
    """The configuration in the file, its paths absolute; the defaults for None. Raises ConfigError."""
    if path is None:
        return _absolute(Config(), Path("/"))
    config, problems = read(path, Config)
    config = _absolute(config, path.absolute().parent)
    _check_together(config, problems)
    problems.raise_if_any()
    return config


def read(path: Path, section: type[S]) -> tuple[S, Problems]:
    """The file as a section, and what is wrong with it. Raises ConfigError for a file that can not be read at all."""
    problems = Problems(str(path), all_keys(section))
    return _walk_section(_compose(path, problems), section, "", problems), problems


def _compose(path: Path, problems: Problems) -> yaml.Node | None:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError("bad_config", f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        problems.add(data.count(b"\n", 0, error.start) + 1, "", f"not UTF-8: byte 0x{data[error.start]:02x}")
        return None
    try:
        _refuse_aliases(text, problems)
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.add(line, "", f"not valid YAML: the character {chr(error.character)!a} is not allowed")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = 1 if mark is None else mark.line + 1
        what = ", ".join(part for part in (error.context, error.problem) if part)
        problems.add(line, "", f"not valid YAML: {what}")
    except RecursionError:
        problems.add(1, "", "not valid YAML: nested too deeply")
    return None


def _refuse_aliases(text: str, problems: Problems) -> None:
    """Told of each line once. Values that come from elsewhere have no line of their own, and tags name Python types."""
    lines = set()
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if getattr(event, "anchor", None) is not None or getattr(event, "tag", None) is not None:
            lines.add(event.start_mark.line + 1 if event.start_mark else 1)
    for line in lines:
        problems.add(line, "", _NO_ALIASES)


def _walk_section(node: yaml.Node | None, section: type[S], prefix: str, problems: Problems) -> S:
    """One mapping as its section; what is wrong goes to `problems`, and has its default in the result."""
    fields = {one.encode_name: one for one in msgspec.structs.fields(section)}
    values: dict[str, object] = {}
    for name, key, line, value_node in _pairs(node, prefix, problems):
        if name in section.unsupported:
            problems.add(line, key, f"not supported: {section.unsupported[name]}")
        elif name not in fields:
            problems.add(line, key, f"unknown key{_suggestion(key, problems.known)}")
        else:
            try:
                values[fields[name].name] = _walk_value(value_node, fields[name].type, key, problems)
            except ValueError as error:
                problems.add(value_node.start_mark.line + 1, key, str(error))
    return section(**values)


def _pairs(node: yaml.Node | None, prefix: str, problems: Problems) -> Iterator[tuple[str, str, int, yaml.Node]]:
    """The keys of a mapping, each once: its name, its dotted name, its line, and its value."""
    if node is None or _is_empty(node):
        return
    if not isinstance(node, yaml.MappingNode):
        problems.add(node.start_mark.line + 1, prefix.rstrip("."), "expected keys with values below it")
        return
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            problems.add(line, prefix.rstrip("."), "a key must be one word")
            continue
        name = str(key_node.value)
        key = prefix + name
        if key in problems.lines:
            problems.add(line, key, f"given twice, first in line {problems.lines[key]}")
            continue
        problems.lines[key] = line
        yield name, key, line, value_node


def _walk_value(node: yaml.Node, kind: typing.Any, key: str, problems: Problems) -> object:
    below = section_of(kind)
    if below is not None:
        return _walk_section(node, below, f"{key}.", problems)
    kinds = (kind, *typing.get_args(kind))
    container = next((part for part in kinds if typing.get_origin(part) in (dict, tuple)), None)
    if typing.get_origin(container) is dict:
        return _walk_names(node, typing.get_args(container)[1], key, problems)
    if typing.get_origin(container) is tuple:
        if not isinstance(node, yaml.SequenceNode):
            raise ValueError("expected a list")
        return tuple(_walk_value(item, typing.get_args(container)[0], key, problems) for item in node.value)
    if not isinstance(node, yaml.ScalarNode):
        found = "a list" if isinstance(node, yaml.SequenceNode) else "keys below it"
        raise ValueError(f"expected one value, not {found}")  # noqa: TRY004  (told to people, with its line)
    return _read_scalar(node, kind)


def _walk_names(node: yaml.Node, kind: typing.Any, key: str, problems: Problems) -> dict[str, object]:
    """A mapping whose keys are names of the operator's choice."""
    values: dict[str, object] = {}
    for name, dotted, _, value_node in _pairs(node, f"{key}.", problems):
        try:
            values[name] = _walk_value(value_node, kind, dotted, problems)
        except ValueError as error:
            problems.add(value_node.start_mark.line + 1, dotted, str(error))
    return values


def section_of(kind: typing.Any) -> type[Section] | None:
    """The section that a key's type is, or may be."""
    kinds = (kind, *typing.get_args(kind))
    return next((part for part in kinds if isinstance(part, type) and issubclass(part, Section)), None)


def _read_scalar(node: yaml.ScalarNode, kind: typing.Any) -> object:
    """The scalar as its key's type, in range. Raises ValueError in words that a person understands."""
    choices, metas, base, is_optional = describe(kind)
    text = node.value
    if node.tag == "tag:yaml.org,2002:null":
        if is_optional:
            return None
        raise ValueError("has no value")
    if text in choices:
        return text
    if choices and base is str:
        raise ValueError(f"must be one of {', '.join(map(str, choices))}, not {text!r}")
    value: int | float | str = text
    if base is bool:
        if text not in ("true", "false"):
            raise ValueError(f"must be true or false, not {text!r}")
        return text == "true"
    if base is int:
        if not re.fullmatch(r"[-+]?[0-9]+", text):
            raise ValueError(f"must be {' or '.join(['a whole number', *map(str, choices)])}, not {text!r}")
        if len(text) > len(str(_MAX_INT)) + 1:
            raise ValueError(f"must be a whole number of at most {len(str(_MAX_INT))} digits")
        value = int(text)
        metas = [*metas, msgspec.Meta(le=_MAX_INT)]
    elif base is float:
        if not re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text):
            raise ValueError(f"must be a number, not {text!r}")
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"is too large: {text}")
    elif not text:
        raise ValueError("must not be empty")
    elif not text.isprintable():
        raise ValueError(f"must not hold control characters: {_shown(text, metas)}")
    elif base is Path:
        return Path(text)
    _check_range(value, text, metas)
    return value


def describe(kind: typing.Any) -> tuple[tuple[object, ...], list[msgspec.Meta], object, bool]:
    """Words that are allowed, the ranges, the bare type of other values, and whether null is allowed."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    parts = [*typing.get_args(kind)] if is_union else [kind]
    is_optional = type(None) in parts
    choices: tuple[object, ...] = ()
    metas: list[msgspec.Meta] = []
    base: object = str
    for part in parts:
        if typing.get_origin(part) is typing.Literal:
            choices = typing.get_args(part)
        elif typing.get_origin(part) is typing.Annotated:
            base, *rest = typing.get_args(part)
            metas = [meta for meta in rest if isinstance(meta, msgspec.Meta)]
        elif part is not type(None):
            base = part
    return choices, metas, base, is_optional


def _check_range(value: float | str, text: str, metas: list[msgspec.Meta]) -> None:
    for meta in metas:
        if isinstance(value, str):
            if meta.pattern is not None and not re.search(meta.pattern, value):
                raise ValueError(f"{_shown(value, metas)} does not have the form that is expected ({meta.description})")
            continue
        for limit, words, holds in (
            (meta.ge, "at least", operator.ge),
            (meta.gt, "above", operator.gt),
            (meta.le, "at most", operator.le),
            (meta.lt, "below", operator.lt),
        ):
            if limit is not None and not holds(value, limit):
                raise ValueError(f"must be {words} {written(limit)}, not {text}")


def written(limit: float) -> str:
    """As short as it can be exact: 0.5, 100000, 9223372036854775807."""
    return f"{limit:g}" if "e" not in f"{limit:g}" and float(f"{limit:g}") == limit else str(limit)


def _shown(text: str, metas: list[msgspec.Meta]) -> str:
    """The value as it was written, unless it is a secret: errors go to the journal, which many may read."""
    if any((meta.extra or {}).get("is_secret") for meta in metas):
        return "the value"
    return repr(text) if text.isprintable() else ascii(text)


def all_keys(section: type[Section] = Config) -> list[str]:
    """Every dotted key of the section and of those below it."""
    keys = []
    for one in msgspec.structs.fields(section):
        below = section_of(one.type)
        keys += [f"{one.encode_name}.{key}" for key in all_keys(below)] if below else [one.encode_name]
    return keys


def _suggestion(key: str, keys: list[str]) -> str:
    """The same name in another section, one spelled nearly so in this section, or in any."""
    section, _, name = key.rpartition(".")
    close = _keys_named(name, keys)
    if not close:
        inside = keys + [other.rpartition(".")[0] for other in keys]
        siblings = {
            other.rpartition(".")[2]: other for other in inside if other.rpartition(".")[0] == section and other
        }
        close = [siblings[near] for near in difflib.get_close_matches(name, siblings, 1, 0.6)]
    if not close:
        near_names = difflib.get_close_matches(name, sorted({other.rpartition(".")[2] for other in keys}), 1, 0.8)
        close = _keys_named(near_names[0], keys) if near_names else []
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _keys_named(name: str, keys: list[str]) -> list[str]:
    return [key for key in keys if key.rpartition(".")[2] == name]


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _absolute(config: Config, base: Path) -> Config:
    """Relative paths are relative to the configuration file, wherever the service was started from."""
    replace = msgspec.structs.replace
    python, web_config = config.worker.python, config.metrics.web_config
    return replace(
        config,
        spool=replace(config.spool, dir=base / config.spool.dir),
        models=replace(config.models, dir=base / config.models.dir),
        state=replace(config.state, dir=base / config.state.dir),
        metrics=replace(config.metrics, web_config=None if web_config is None else base / web_config),
        worker=replace(config.worker, python=python if python == "auto" else str(base / python)),
    )


def _check_together(config: Config, problems: Problems) -> None:
    """What no key can tell alone. Keys that are wrong by themselves are left out: their values are not in `config`."""
    lines = problems.lines
    if "metrics.listen" in lines and "metrics.listen" not in problems.keys:
        try:
            host, _ = split_address(config.metrics.listen)
            host.encode("idna")
        except UnicodeError:
            problems.add(lines["metrics.listen"], "metrics.listen", f"{host!r} is no host name and no address")
        except ValueError as error:
            problems.add(lines["metrics.listen"], "metrics.listen", str(error))
    keys = [key for key in ("spool.dir", "models.dir", "state.dir") if key not in problems.keys]
    for position, key in enumerate(keys):
        for other in keys[:position]:
            path, other_path = (Path(os.path.normpath(str(get_key(config, name)))) for name in (key, other))
            if path.is_relative_to(other_path) or other_path.is_relative_to(path):
                line = max(lines.get(key, 1), lines.get(other, 1))
                problems.add(line, key, f"{path} and {other} {other_path} must not lie within each other")
