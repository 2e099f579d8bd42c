"""The documents name what the code has, and what they name exists."""

import ast
import re
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from retraind import cli, config_file
from retraind.config import RESTART_KEYS
from retraind.errors import RetraindError
from retraind.supervisor.metrics import FAULTS, Metrics
from retraind.supervisor.series import OptionalGauges

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "daemon" / "retraind"
PAGES = ("ARCHITECTURE", "CONTRIBUTING", "OPERATIONS", "RELIABILITY", "CHANGELOG")
DOCUMENTS = ("README.md", *(f"docs/{name}.md" for name in PAGES))
GATE = (PACKAGE / "supervisor" / "gate.py").read_text()


def read(document: str) -> str:
    return (ROOT / document).read_text()


def says(document: str, word: str) -> bool:
    """Whether the word stands in the document by itself, not as a part of another one."""
    return re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", read(document)) is not None


def families(base: type[RetraindError] = RetraindError) -> list[type[RetraindError]]:
    return [family for direct in base.__subclasses__() for family in (direct, *families(direct))]


def codes() -> set[str]:
    return set().union(*(family.codes for family in families())) | set(re.findall(r'code="(\w+)"', GATE))


def metric_names() -> list[str]:
    """As they are scraped: the optional ones, which have no value now, by their tables."""
    metrics = Metrics()
    described: list[Metric] = list(metrics.registry.collect())
    names = [metric.name + "_total" * (metric.type == "counter") for metric in described]
    for part in metrics.registry._collector_to_names:
        if isinstance(part, OptionalGauges):
            names += [f"retraind_{part._subject}_{name}" for name in part._texts]
    return [name for name in names if name.startswith("retraind_")]


def verbs() -> list[str]:
    actions = [action for action in cli.build_parser()._actions if action.dest == "verb"]
    return list(actions[0].choices)


@pytest.mark.parametrize("name", metric_names())
def test_every_metric_is_explained_to_operators(name: str) -> None:
    assert says("docs/OPERATIONS.md", name)


def test_the_operators_page_names_no_metric_that_is_not_there() -> None:
    named = set(re.findall(r"^\| (`retraind_.*?) \|", read("docs/OPERATIONS.md"), re.MULTILINE))
    assert {name for cell in named for name in re.findall(r"`(\w+)`", cell)} == set(metric_names())


@pytest.mark.parametrize("code", sorted(codes()))
def test_every_code_is_explained_to_operators_and_stands_in_the_architecture(code: str) -> None:
    assert says("docs/OPERATIONS.md", code)
    assert says("docs/ARCHITECTURE.md", code)


@pytest.mark.parametrize("family", families(), ids=lambda family: family.__name__)
def test_every_family_stands_in_the_architecture_with_its_codes_and_exit_status(family: type[RetraindError]) -> None:
    row = re.search(rf"^\| {family.__name__} \|(.*)\|.*\| (\d+) \|$", read("docs/ARCHITECTURE.md"), re.MULTILINE)
    assert int(row[2]) == family.exit_status
    assert set(row[1].partition("|")[0].strip().split(", ")) == family.codes


@pytest.mark.parametrize("key", config_file.all_keys())
def test_every_key_has_its_place_in_the_table_of_reloads(key: str) -> None:
    rows = re.findall(r"^\| (at once|from the next attempt on|at a restart only) \| (.*) \|$",
                      read("docs/OPERATIONS.md"), re.MULTILINE)  # fmt: skip
    places = [when for when, keys in rows if f"`{key}`" in keys.split(", ")]
    assert len(places) == 1
    assert (places == ["at a restart only"]) == (key in RESTART_KEYS)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_a_cause_and_a_remedy(fault: str) -> None:
    assert re.search(rf"^\| `{fault}` \| .+ \| .+ \|$", read("docs/OPERATIONS.md"), re.MULTILINE)


@pytest.mark.parametrize("verb", verbs())
def test_every_command_is_named_to_operators(verb: str) -> None:
    assert f"`retraind {verb}`" in read("docs/OPERATIONS.md")
    assert f"retraind {verb}" in read("README.md")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_has_its_line_in_the_architecture(path: Path) -> None:
    inside = path.relative_to(PACKAGE)
    layout = re.search(r"## Layout\n(.*?)\n## ", read("docs/ARCHITECTURE.md"), re.DOTALL)[1]
    if inside.name == "__init__.py":
        assert inside.parent == Path() or f"`{inside.parent}/" in layout
        return
    section = {"supervisor": "supervisor", "worker": "worker", "worker/readers": "readers"}.get(str(inside.parent))
    rows = re.split(r"^\| \*\*(\w[\w ]*)\*\*.*$", layout, flags=re.MULTILINE)
    named = dict(zip(rows[1::2], rows[2::2], strict=True)).get(section, layout) if section else layout
    assert f"`{inside.name if section else inside}`" in named


@pytest.mark.parametrize("document", [*DOCUMENTS, "benchmarks/RESULTS.md"])
def test_every_relative_link_leads_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", read(document)):
        assert ((ROOT / document).parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_of_the_repository_that_is_named_exists(document: str) -> None:
    named = re.findall(r"(?<![\w/.])(?:tests|docs|etc|systemd|benchmarks|\.ci)/[\w./-]*\w", read(document))
    for name in named:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize(("path", "test"), re.findall(r"`(tests/\S+?\.py)::(\w+)`", read("docs/ARCHITECTURE.md")))
def test_every_test_that_holds_an_invariant_exists(path: str, test: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_invariant_has_a_test() -> None:
    table = re.search(r"## Invariants\n(.*?)\n## ", read("docs/ARCHITECTURE.md"), re.DOTALL)[1]
    heading, rule, *rows = [line for line in table.splitlines() if line.startswith("|")]
    assert (heading.split()[-2], set(rule)) == ("test", set("|-"))
    assert len(rows) > 10
    assert all(re.fullmatch(r"\| \d* ?\| .+ \| `tests/\S+::test_\w+` \|", row) for row in rows), rows


def test_the_pinned_linters_are_those_of_the_project_file() -> None:
    project = read("pyproject.toml")
    for tool in ("ruff", "mypy"):
        version = re.search(rf'"{tool}==([\d.]+)"', project)[1]
        assert f"{tool} {version}" in read("docs/ARCHITECTURE.md")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_documents_are_plain_ascii(document: str) -> None:
    assert read(document).isascii()
