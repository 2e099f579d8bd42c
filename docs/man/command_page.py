"""The generated parts of retraind(8): what the parser of the command line knows of verbs, options and exit statuses.

Walks the parser's actions and never formats its help, whose layout differs between the versions of Python.
"""

import argparse
import textwrap
from collections.abc import Iterator

import roff
from retraind import cli, config_file

NAMES = frozenset(config_file.all_keys())


def parts() -> dict[str, str]:
    """What the template may ask for."""
    parser = cli.build_parser()
    verbs = _verbs(parser)
    shared = _shared(verbs)
    summary = str(parser.description).rstrip(".")
    return {
        "SUMMARY": roff.prose(summary[0].lower() + summary[1:]),
        "SYNOPSIS": "\n".join([*(_synopsis(name, verb) for name, verb in verbs.items()), _own_synopsis(parser)]),
        "COMMANDS": "\n".join(_command(name, verb, shared) for name, verb in verbs.items()),
        "OPTIONS": "\n".join([*_shared_options(verbs, shared), *_own_options(parser, shared)]),
        "EXIT_STATUS": "\n".join(
            roff.entry(roff.bold(str(status)), roff.prose(meaning, NAMES))
            for status, meaning in cli.EXIT_STATUSES.items()
        ),
    }


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    # argparse offers no public way to look at a parser; this attribute is the same in every version since 2.7.
    return parser._actions  # noqa: SLF001


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(dict(action.choices) for action in _actions(parser) if isinstance(action.choices, dict))


def _shared(verbs: dict[str, argparse.ArgumentParser]) -> dict[str, list[str]]:
    """Options that more than one verb takes, with the same words: they are explained once."""
    takers: dict[str, list[str]] = {}
    for name, verb in verbs.items():
        for action in _actions(verb):
            if action.option_strings:
                takers.setdefault(_identity(action), []).append(name)
    return {identity: names for identity, names in takers.items() if len(names) > 1}


def _identity(action: argparse.Action) -> str:
    return f"{action.option_strings} {action.help}"


def _help(action: argparse.Action) -> str:
    """The help text as a sentence, with what argparse would put into it."""
    text = str(action.help or "") % {**vars(action), "prog": "retraind"}
    return roff.prose(f"{text[:1].upper()}{text[1:]}.", NAMES) if text else ""


def _value(action: argparse.Action) -> str:
    """What stands for the value of an option or for a positional argument."""
    if action.choices is not None:
        return "|".join(roff.bold(str(choice)) for choice in action.choices)
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return roff.italic(metavar) + (r"\~.\|.\|." if action.nargs in ("+", "*") else "")


def _written(action: argparse.Action, separator: str = ", ") -> str:
    """`-h, --help`, `--config FILE`, `JOB`."""
    if not action.option_strings:
        return _value(action)
    names = separator.join(roff.bold(name) for name in action.option_strings)
    return names if action.nargs == 0 else rf"{names}\~{_value(action)}"


def _terms(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The arguments of a verb's synopsis: options, then the rest, those that exclude each other in one."""
    groups = {action: group for group in parser._mutually_exclusive_groups for action in group._group_actions}  # noqa: SLF001
    told = set()
    for action in sorted(_actions(parser), key=lambda action: action in groups or not action.option_strings):
        group = groups.get(action)
        if isinstance(action, argparse._HelpAction) or group in told:  # noqa: SLF001
            continue
        if group is None:
            is_needed = action.nargs != "?" and (not action.option_strings or action.required)
            yield _written(action, "|") if is_needed else f"[{_written(action, '|')}]"
        else:
            told.add(group)
            choice = "|".join(_written(member, "|") for member in group._group_actions)  # noqa: SLF001
            yield f"{{{choice}}}" if group.required else f"[{choice}]"


def _synopsis(name: str, verb: argparse.ArgumentParser) -> str:
    return "\n".join([rf'.SY "retraind {roff.escape(name)}"', *_terms(verb), ".YS"])


def _own_synopsis(parser: argparse.ArgumentParser) -> str:
    names = "|".join(_written(action, "|") for action in _actions(parser) if action.option_strings)
    return f".SY retraind\n{{{names}}}\n.YS"


def _command(name: str, verb: argparse.ArgumentParser, shared: dict[str, list[str]]) -> str:
    """A verb: its name as a tag, what it does, then the arguments that only it takes."""
    own = [action for action in _actions(verb) if _identity(action) not in shared]
    entries = [roff.entry(_written(action), _help(action)) for action in own]
    # Arguments hang below their verb; .RE leads back.
    below = [".RS", *entries, ".RE"] if entries else []
    return "\n".join([roff.entry(roff.bold(f"retraind {name}"), *_paragraphs(str(verb.description))), *below])


def _paragraphs(text: str) -> list[str]:
    """A verb's description: paragraphs, and lines set in by two blanks, which are examples."""
    blocks: list[tuple[bool, list[str]]] = []
    for line in text.splitlines():
        is_example = line.startswith("  ")
        if not line or not blocks or blocks[-1][0] != is_example:
            blocks.append((is_example, []))
        blocks[-1][1].append(line)
    filled = [(is_example, lines) for is_example, lines in blocks if any(lines)]
    return [
        roff.example(line.strip() for line in lines) if is_example else roff.prose(" ".join(lines), NAMES)
        for is_example, lines in filled
    ]


def _shared_options(verbs: dict[str, argparse.ArgumentParser], shared: dict[str, list[str]]) -> Iterator[str]:
    told = set()
    for verb in verbs.values():
        for action in _actions(verb):
            takers = shared.get(_identity(action))
            if takers is None or _identity(action) in told:
                continue
            told.add(_identity(action))
            yield roff.entry(_written(action), _help(action) + _whose(takers, list(verbs)))


def _whose(takers: list[str], verbs: list[str]) -> str:
    """The commands that take an option, or those that do not, whichever are fewer."""
    others = [name for name in verbs if name not in takers]
    if not others:
        return "\nEvery command takes it."
    few, words = (others, "Every command takes it but") if len(others) < len(takers) else (takers, "Of")
    names = [roff.bold(name) for name in few]
    listed = ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]
    return "\n" + textwrap.fill(f"{words} {listed}.", 78, break_long_words=False, break_on_hyphens=False)


def _own_options(parser: argparse.ArgumentParser, shared: dict[str, list[str]]) -> Iterator[str]:
    for action in _actions(parser):
        if action.option_strings and _identity(action) not in shared:
            yield roff.entry(_written(action), _help(action))
