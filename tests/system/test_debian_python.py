"""The other suites under Debian's own Python and libraries: the oldest versions that are supported."""

import re
from collections.abc import Callable

import pytest
from conftest import copy_sources
from machine import Machine

# Linters are those of the project file, which Debian has in other versions; git's list of files needs a checkout.
LEFT_OUT = "--ignore=tests/unit/test_linters.py"


@pytest.fixture(scope="module")
def machine(new_machine: Callable[[str], Machine]) -> Machine:
    made = new_machine("python")
    copy_sources(made)
    return made.boot()


# When the processors are free again.
@pytest.mark.last
@pytest.mark.parametrize("suite", ["tests/unit", "tests/worker", "tests/service/test_end_to_end.py"])
def test_the_suite_passes_on_debians_python_and_torch(machine: Machine, suite: str) -> None:
    command = f"cd /src/retraind; PYTHONPATH=$PWD/daemon python3 -m pytest -q -p no:cacheprovider {LEFT_OUT} {suite}"
    done = machine.run(command, seconds=1200)
    said = "\n".join(line for line in done.stdout.splitlines() if re.match(r"E  |FAILED|ERROR|=", line))
    assert done.returncode == 0, said[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
