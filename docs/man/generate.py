"""Writes the manual, retraind(8) and retraind.yaml(5), into a directory: `python3 docs/man/generate.py build/man`.

What the code knows (verbs, options, exit statuses, keys, types, defaults) is taken from the code; what has no home
there stands in the templates beside this program. Owns the templates, the date and the files that are written. Needs
what the supervisor needs and no more, so that a package can be built on a machine without numpy and torch.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# The manual is of the tree that it stands in, never of a retraind that is installed beside it.
sys.path.insert(0, str(ROOT / "daemon"))

import command_page
import config_page
import roff
from retraind import __version__, cli

TEMPLATES = ("retraind.8.in", "retraind.yaml.5.in")


class TemplateError(Exception):
    """A template asks for what there is not."""


def written_on(environment: Mapping[str, str], changelog: Path) -> str:
    """The pages' date: of SOURCE_DATE_EPOCH, which a package's build sets, else of the changelog. Never today's."""
    epoch = environment.get("SOURCE_DATE_EPOCH")
    if epoch is not None:
        if not epoch.isdecimal():
            raise TemplateError(
                f"SOURCE_DATE_EPOCH is {epoch!r}: expected seconds since 1970, as digits, or no such name"
            )
        return datetime.fromtimestamp(int(epoch), UTC).date().isoformat()
    heading = re.search(r"^## \[.+?\] - (\S+)$", changelog.read_text(encoding="utf-8"), re.MULTILINE)
    if heading is None:
        raise TemplateError(f"{changelog}: no heading of the form `## [1.2.3] - 2026-12-01`: set SOURCE_DATE_EPOCH")
    return heading[1]


def fill(template: Path, parts: Mapping[str, str]) -> str:
    """The template with each @WORD@ replaced. Raises TemplateError with the line of a word that is not known."""

    def part(match: re.Match[str]) -> str:
        if match[1] not in parts:
            line = text.count("\n", 0, match.start()) + 1
            raise TemplateError(f"{template}:{line}: nothing is known as {match[0]}: one of {', '.join(sorted(parts))}")
        return parts[match[1]]

    text = template.read_text(encoding="utf-8")
    return re.sub(r"@([\w.:]+)@", part, text)


def pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Every page by the name of its file."""
    parts = {
        "DATE": written_on(environment, ROOT / "docs" / "CHANGELOG.md"),
        "VERSION": roff.escape(__version__),
        "CONFIG_FILE": roff.escape(str(cli.DEFAULT_CONFIG)),
        **command_page.parts(),
        **config_page.parts(ROOT / "etc" / "retraind.yaml"),
    }
    return {name.removesuffix(".in"): fill(HERE / name, parts) for name in TEMPLATES}


def main() -> int:
    """Writes the pages; 0, or 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(description="Writes retraind.8 and retraind.yaml.5 into a directory.")
    parser.add_argument("directory", type=Path, help="made if it does not exist")
    directory: Path = parser.parse_args().directory
    try:
        made = pages(os.environ)
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            (directory / name).write_text(text, encoding="ascii", newline="\n")
    except (TemplateError, config_page.SourceError, OSError) as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
