"""What the tests of the models directory share."""

from pathlib import Path

import pytest

from retraind.supervisor.publish import Publisher


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    publisher = Publisher(tmp_path / "models", "telemetry_autoencoder")
    publisher.open()
    return publisher
