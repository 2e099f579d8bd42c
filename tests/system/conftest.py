"""Machines and the package for all system tests. Where a machine can not be made they skip, and in CI they fail."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from installed import Service, block_of_readme
from machine import NEEDED_COMMANDS, ROOT, Machine, base_root, clear, place_of_this_run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker("system")
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


def _missing() -> str:
    if os.geteuid() != 0:
        return "the system tests boot machines, which only root may"
    lacking = [command for command in NEEDED_COMMANDS if shutil.which(command) is None]
    return f"not installed: {', '.join(lacking)} (packages mmdebstrap and systemd-container)" if lacking else ""


@pytest.fixture(scope="session")
def base() -> Path:
    if why := _missing():
        if os.environ.get("CI"):
            pytest.fail(f"{why}, and CI is set")
        pytest.skip(why)
    return base_root()


@pytest.fixture(scope="session")
def new_machine(base: Path) -> Iterator[Callable[[str], Machine]]:
    """Makes machines by name, not booted; all of them are gone at the end."""
    made: list[Machine] = []
    with place_of_this_run() as run:

        def make(name: str) -> Machine:
            place = run / name
            place.mkdir()
            made.append(Machine(place, base))
            return made[-1]

        yield make
        for machine in made:
            machine.stop()
            clear(machine.place)


@pytest.fixture(scope="session")
def readme_machine(new_machine: Callable[[str], Machine]) -> Machine:
    """A fresh Debian on which the commands of README's section on installation were run, from a copy of the sources."""
    machine = new_machine("readme")
    copy_sources(machine)
    machine.boot()
    machine.shell(f"cd /src/retraind\n{block_of_readme('tested on Debian 13', 'sh')}")
    return machine


def copy_sources(machine: Machine) -> None:
    """What git knows or would add, as a fresh clone would have it."""
    target = machine.root / "src/retraind"
    target.mkdir(parents=True)
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    present = b"\0".join(name for name in names.split(b"\0") if name and os.path.lexists(ROOT / os.fsdecode(name)))
    pack = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"], cwd=ROOT, input=present, capture_output=True, check=True
    )
    subprocess.run(["tar", "--extract", "--no-same-owner", "--directory", target], input=pack.stdout, check=True)


@pytest.fixture(scope="session")
def package(readme_machine: Machine) -> Path:
    """The .deb that those commands have built."""
    (found,) = (readme_machine.root / "src").glob("retraind_*_all.deb")
    return found


@pytest.fixture(scope="session")
def install(new_machine: Callable[[str], Machine], package: Path) -> Callable[[str], Service]:
    """Boots a machine with the package installed by apt and a producer in its group."""

    def make(name: str) -> Service:
        machine = new_machine(name)
        shutil.copy(package, machine.root / "root/retraind_all.deb")
        machine.boot()
        machine.shell("apt-get install /root/retraind_all.deb")
        service = Service(machine)
        service.add_producer()
        return service

    return make
