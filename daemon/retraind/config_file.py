"""YAML -> Config: every problem at once, each as `file:line: key: problem (did you mean ...)`.

The only importer of yaml. Walks the node tree against the typed sections, so that each problem has its line and a
scalar is read as the type that its key has: `1e-3` is a number, `no` is text where text is expected, and two equal
keys are an error, which plain YAML loading gets wrong without a word. Raises ConfigError, never anything else.
"""

import difflib
import operator
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import yaml

from retraind.config import Config, Section, get_key, split_address
from retraind.errors import ConfigError

S = typing.TypeVar("S", bound=Section)
_NO_ALIASES = "aliases, anchors and tags are not supported: write the value out"


@dataclass
class _Problems:
    """Collected while walking; in the order of the file's lines when told."""

    file: str
    found: list[tuple[int, str]] = field(default_factory=list)

    def add(self, line: int, key: str, problem: str) -> None:
        place = f"{self.file}:{line}: " + (f"{key}: " if key else "")
        self.found.append((line, place + problem))

    def raise_if_any(self) -> None:
        if self.found:
            text = "\n".join(message for _, message in sorted(self.found, key=lambda item: item[0]))
            raise ConfigError("bad_config", text)


def load(path: Path | None) -> Config:
    """The configuration in the file, its paths absolute; the defaults for None. Raises ConfigError."""
    if path is None:
        return _absolute(Config(), Path("/"))
    problems = _Problems(str(path))
    lines: dict[str, int] = {}
    config = _walk_section(_compose(path, problems), Config, "", problems, lines)
    problems.raise_if_any()
    config = _absolute(config, path.absolute().parent)
    _check_together(config, problems, lines)
    problems.raise_if_any()
    return config


def _compose(path: Path, problems: _Problems) -> yaml.Node | None:
    try:
        text = path.read_bytes().decode("utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            problems.add(1, "", _NO_ALIASES)
            return None
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError("bad_config", f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("bad_config", f"{path}: not UTF-8 at byte {error.start}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problems.add(mark.line + 1 if mark else 1, "", f"not valid YAML: {getattr(error, 'problem', None) or error}")
        return None


def _walk_section(
    node: yaml.Node | None, section: type[S], prefix: str, problems: _Problems, lines: dict[str, int]
) -> S:
    """One mapping as its section; what is wrong goes to `problems`, and has its default in the result."""
    values: dict[str, object] = {}
    if node is None or _is_empty(node):
        return section()
    if not isinstance(node, yaml.MappingNode):
        problems.add(node.start_mark.line + 1, prefix.rstrip("."), "expected keys with values below it")
        return section()
    types = typing.get_type_hints(section, include_extras=True)
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        name = str(key_node.value)
        key = prefix + name
        if name not in types:
            problems.add(line, key, f"unknown key{_suggestion(key)}")
        elif key in lines:
            problems.add(line, key, f"given twice, first in line {lines[key]}")
        else:
            lines[key] = line
            try:
                values[name] = _walk_value(value_node, types[name], key, problems, lines)
            except ValueError as error:
                problems.add(value_node.start_mark.line + 1, key, str(error))
    return section(**values)


def _walk_value(node: yaml.Node, kind: typing.Any, key: str, problems: _Problems, lines: dict[str, int]) -> object:
    if isinstance(kind, type) and issubclass(kind, Section):
        return _walk_section(node, kind, f"{key}.", problems, lines)
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("expected one value")  # noqa: TRY004  (told to people, with its line)
    return _read_scalar(node, kind)


def _read_scalar(node: yaml.ScalarNode, kind: typing.Any) -> object:
    """The scalar as its key's type, in range. Raises ValueError in words that a person understands."""
    choices, metas, base, is_optional = _describe(kind)
    text = node.value
    if node.tag == "tag:yaml.org,2002:null":
        if is_optional:
            return None
        raise ValueError("has no value")
    if not node.tag.startswith("tag:yaml.org,2002:"):
        raise ValueError(_NO_ALIASES)
    if choices:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(map(str, choices))}, not {text!r}")
        return text
    value: int | float | str = text
    if base is int:
        if not re.fullmatch(r"[-+]?[0-9]+", text):
            raise ValueError(f"must be a whole number, not {text!r}")
        value = int(text)
    elif base is float:
        if not re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text):
            raise ValueError(f"must be a number, not {text!r}")
        value = float(text)
    elif not text:
        raise ValueError("must not be empty")
    elif base is Path:
        return Path(text)
    _check_range(value, metas)
    return value


def _describe(kind: typing.Any) -> tuple[tuple[object, ...], list[msgspec.Meta], object, bool]:
    """Choices of a Literal, the ranges, the bare type, and whether null is allowed."""
    is_optional = type(None) in typing.get_args(kind)
    if is_optional:
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    metas: list[msgspec.Meta] = []
    if typing.get_origin(kind) is typing.Annotated:
        kind, *rest = typing.get_args(kind)
        metas = [meta for meta in rest if isinstance(meta, msgspec.Meta)]
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    return choices, metas, kind, is_optional


def _check_range(value: float | str, metas: list[msgspec.Meta]) -> None:
    for meta in metas:
        if isinstance(value, str):
            if meta.pattern is not None and not re.search(meta.pattern, value):
                raise ValueError(f"{value!r} does not have the form that is expected ({_FORMS[meta.pattern]})")
            continue
        for limit, words, holds in (
            (meta.ge, "at least", operator.ge),
            (meta.gt, "above", operator.gt),
            (meta.le, "at most", operator.le),
            (meta.lt, "below", operator.lt),
        ):
            if limit is not None and not holds(value, limit):
                raise ValueError(f"must be {words} {limit:g}, not {value:g}")


def _forms() -> dict[str, str]:
    types = typing.get_type_hints(Config, include_extras=True)
    models = typing.get_type_hints(types["models"], include_extras=True)["name"]
    listen = typing.get_type_hints(types["metrics"], include_extras=True)["listen"]
    name, address = (_describe(kind)[1][0].pattern for kind in (models, listen))
    return {str(name): "letters, digits, `_`, `.` and `-`", str(address): "host:port or [address]:port"}


_FORMS = _forms()


def all_keys() -> list[str]:
    """Every dotted key."""
    keys = []
    for name, kind in typing.get_type_hints(Config, include_extras=True).items():
        if isinstance(kind, type) and issubclass(kind, Section):
            keys += [f"{name}.{key}" for key in typing.get_type_hints(kind)]
        else:
            keys.append(name)
    return keys


def _suggestion(key: str) -> str:
    keys = all_keys()
    name = key.rpartition(".")[2]
    elsewhere = [other for other in keys if other.rpartition(".")[2] == name]
    sections = sorted({other.partition(".")[0] for other in keys})
    close = elsewhere or difflib.get_close_matches(key, keys + sections, 1, 0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _absolute(config: Config, base: Path) -> Config:
    """Relative paths are relative to the configuration file, wherever the service was started from."""
    replace = msgspec.structs.replace
    python = config.worker.python
    return replace(
        config,
        spool=replace(config.spool, dir=base / config.spool.dir),
        models=replace(config.models, dir=base / config.models.dir),
        state=replace(config.state, dir=base / config.state.dir),
        worker=replace(config.worker, python=python if python == "auto" else str(base / python)),
    )


def _check_together(config: Config, problems: _Problems, lines: dict[str, int]) -> None:
    try:
        split_address(config.metrics.listen)
    except ValueError as error:
        problems.add(lines["metrics.listen"], "metrics.listen", str(error))
    keys = ("spool.dir", "models.dir", "state.dir")
    for position, key in enumerate(keys):
        for other in keys[:position]:
            path, other_path = (Path(str(get_key(config, name))) for name in (key, other))
            if path.is_relative_to(other_path) or other_path.is_relative_to(path):
                line = lines.get(key) or lines.get(other) or 1
                problems.add(line, key, f"{path} and {other} {other_path} must not lie within each other")
