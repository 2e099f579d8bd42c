"""One service per test, ended with it."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Service


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(**options: object) -> Service:
        made.append(Service(tmp_path, **options))
        return made[-1]

    yield make
    for service in made:
        service.close()


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    """A running service with the fake worker."""
    return make_service().start()
