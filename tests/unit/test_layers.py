"""The house as the imports tell it: layers, two processes that do not know each other, one door per library."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "daemon" / "retraind"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py"
)

LAYERS = {
    **dict.fromkeys(("errors", "config", "job", "events", "report", "printable", "typed_json"), "vocabulary"),
    **dict.fromkeys(("web_config", "column_rules"), "vocabulary"),
    **dict.fromkeys(("config_file", "web_config_file", "fsio", "locks", "logs"), "ground"),
    **dict.fromkeys(("consumer",), "consumer"),
    **dict.fromkeys(("supervisor", "worker", "commands"), ""),  # by the name of the directory
    **dict.fromkeys(("cli", "__main__"), "cli"),
}
MAY_IMPORT = {
    "consumer": set(),  # it is copied into programs of others
    "vocabulary": {"vocabulary"},
    "ground": {"vocabulary", "ground"},
    "supervisor": {"vocabulary", "ground", "supervisor"},
    "worker": {"vocabulary", "ground", "worker"},
    "commands": {"vocabulary", "ground", "supervisor", "worker", "commands"},
    "cli": {"vocabulary", "ground", "supervisor", "worker", "commands", "cli"},
}
# Everything that is not Python's own: who may import it. A name that ends in a dot stands for all below it.
DOORS = {
    "yaml": ("config_file",),
    "watchdog": ("supervisor.wake",),
    "sdnotify": ("supervisor.systemd",),
    "prometheus_client": ("supervisor.series",),
    "bcrypt": ("supervisor.web_passwords",),
    "rich": ("commands.screen",),
    "pynvml": ("worker.nvml",),
    "numpy": ("worker.",),
    "pandas": ("worker.",),
    "pyarrow": ("worker.readers.arrowtable",),
    "torch": (
        *("worker.model", "worker.batches", "worker.step", "worker.train", "worker.checkpoint", "worker.evaluate"),
        *("worker.rows", "worker.linear", "worker.scorer", "worker.seen", "worker.budget", "worker.progress"),
        *("worker.detector", "worker.warm_start", "worker.main", "worker.cuda_context"),
    ),
    "msgspec": ("",),
}  # fmt: skip
# The vocabulary does no I/O and reads no clock; Path and datetime are its words, not its deeds.
VOCABULARY_IMPORTS = {"enum", "typing", "datetime", "pathlib", "hashlib", "msgspec", "collections"}


def layer_of(module: str) -> str:
    head = module.partition(".")[0]
    return LAYERS[head] or head


def imports_of(source: str, module: str = "") -> set[str]:
    """Every absolute name that is imported anywhere in the source, functions included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module or source}: imports are absolute"
            # `from package import name`: the name may be a module of its own.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def read(module: str) -> str:
    path = PACKAGE.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def own_imports(module: str) -> set[str]:
    """The modules of ours that a module imports: the longest known beginning of each name."""
    found = set()
    for name in imports_of(read(module), module):
        parts = name.split(".")
        if parts[0] == "retraind":
            known = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
            found.add(next((candidate for candidate in known if candidate in MODULES), ""))
    return found - {""}  # the package itself: its version


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch", {"torch"}),
        ("import torch.nn as nn, yaml", {"torch.nn", "yaml"}),
        ("from retraind import fsio, logs", {"retraind.fsio", "retraind.logs"}),
        ("def late():\n    from retraind.worker.main import main", {"retraind.worker.main.main"}),
        ("if TYPE_CHECKING:\n    import numpy", {"numpy"}),
    ],
)
def test_an_import_is_seen_wherever_it_stands(source: str, names: set[str]) -> None:
    assert imports_of(source) == names


def test_imports_of_our_own_are_traced_to_their_modules() -> None:
    assert own_imports("supervisor.status") == {"events", "fsio", "report", "typed_json"}
    assert "supervisor.publish" in own_imports("supervisor.main")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_layer_and_below(module: str) -> None:
    layer = layer_of(module)
    above = {name for name in own_imports(module) if layer_of(name) not in MAY_IMPORT[layer]}
    assert not above, f"{module} ({layer}) imports {sorted(above)}"


@pytest.mark.parametrize("module", [module for module in MODULES if layer_of(module) == "vocabulary"])
def test_the_vocabulary_does_no_io_and_reads_no_clock(module: str) -> None:
    foreign = {name.partition(".")[0] for name in imports_of(read(module))} - {"retraind"}
    assert foreign <= VOCABULARY_IMPORTS


def test_a_library_has_one_door() -> None:
    found: dict[str, set[str]] = {library: set() for library in DOORS}
    for module in MODULES:
        for name in imports_of(read(module)):
            library = name.partition(".")[0]
            if library not in sys.stdlib_module_names | {"retraind"}:
                assert library in DOORS, f"{module} imports {library}, which has no door yet"
                found[library].add(module)
    for library, importers in found.items():
        doors = DOORS[library]
        strangers = {
            module
            for module in importers
            if not any(module == door or (door[-1:] in ("", ".") and module.startswith(door)) for door in doors)
        }
        assert not strangers, f"{library} is imported by {sorted(strangers)}"
        assert importers, f"{library} has a door that nobody uses"


def test_the_consumers_module_can_be_copied_alone() -> None:
    names = {name.partition(".")[0] for name in imports_of(read("consumer"))}
    assert names <= sys.stdlib_module_names


def _loaded(statement: str, *arguments: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after the statement."""
    code = f"import sys\n{statement}\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_the_supervisor_loads_nothing_heavy() -> None:
    loaded = _loaded("import retraind.supervisor.main")
    assert "retraind.supervisor.loop" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "pandas", "pyarrow", "rich", "retraind.worker"})


def test_inspect_loads_no_torch(tmp_path: Path) -> None:
    file = tmp_path / "node.csv"
    file.write_text("cpu,load\n1,2\n3,4\n5,7\n")
    loaded = _loaded("from retraind.cli import main; assert main(sys.argv[1:]) == 0", "inspect", str(file), "--json")
    assert "retraind.worker.ingest" in loaded
    assert "torch" not in loaded
