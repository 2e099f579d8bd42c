"""Entry of the worker: `PYTHON -s .../retraind/worker ORDER.json` or `python -m retraind.worker ORDER.json`.

The first form works under an interpreter that has never heard of retraind, as worker.python may name one: the package
is loaded from where this file lies, and no directory is put on that interpreter's path, so that it sees its own
libraries and none of the service's. Ends with the status that the error families prescribe.
"""

import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

# EX_UNAVAILABLE, as HostError: repeated from the error tree, which may be what could not be imported.
_EXIT_UNAVAILABLE = 69


def load_package(directory: Path) -> None:
    """Makes `import retraind` mean the package in `directory`, whatever is installed."""
    spec = importlib.util.spec_from_file_location(
        "retraind", directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["retraind"] = package
    spec.loader.exec_module(package)


def start() -> int:
    """Runs the worker and returns its exit status; 69 when the interpreter lacks what even a failure report needs."""
    worker_dir = Path(__file__).resolve().parent
    if not __package__:
        # A directory that is run comes first on the path, and its `model` or `train` would shadow others' modules.
        sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != worker_dir]
        load_package(worker_dir.parent)
    try:
        from retraind.worker.main import main  # noqa: PLC0415  (the package is known from here on)
    except ImportError as error:
        print(f"<3>worker: {sys.executable} can not run it: {error}", file=sys.stderr)
        return _EXIT_UNAVAILABLE
    return main(sys.argv[1:])


def leave(status: int) -> NoReturn:
    """Ends the process at once: to take an interpreter with torch apart costs a second, and a job would wait for it.

    What the job made is synced by then. Loader processes are ended here, since nothing else would; a thread that hangs
    in a driver is not waited for.
    """
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(start())
