"""One service per test, ended with it; processes and mounts go with the test that made them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Service

pytest.register_assert_rewrite("accounts")  # what differs stands in the message


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(root: Path = tmp_path, **options: object) -> Service:
        root.mkdir(parents=True, exist_ok=True)
        service = Service(root, **options)
        # Every version is counted at the end, and a disk of 4 MiB is below any floor.
        service.settings["models"]["keep"] = None
        service.settings["limits"] = {"min_free_bytes": 0}
        service.write_config()
        made.append(service)
        return service

    yield make
    for service in made:
        service.close()
