"""retraind: watches a spool directory, retrains a telemetry autoencoder, publishes its weights atomically."""

from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retraind.worker.detector import Detector

__version__ = "0.1.0"


def load_model(path: str | PathLike[str]) -> "Detector":
    """A published model that scores arrays: `load_model("/var/models/telemetry_autoencoder").score(rows)`.

    `path` is a model's directory or one version's. Needs torch and numpy, which are imported by the first call.
    """
    from retraind.worker.detector import load_model as load  # noqa: PLC0415  (importing retraind stays light)

    return load(path)
