"""What of the machine is being waited out: said once in the log, kept for STATUS, and a metric each.

A fault has a name from a closed set and a text for people. It never touches a dataset; whoever meets one pauses.
"""

import logging

from retraind.supervisor.metrics import Metrics

log = logging.getLogger(__name__)

# With one of these a publication would fail, or the machine would fill up: nothing is started, /-/ready says no.
BLOCKING = frozenset({"spool", "models", "state", "port", "low_disk"})
# These a worker reported: they end when a worker gets through.
OF_WORKER = ("preflight", "disk", "worker")


class Faults:
    """The faults of this moment, in the order in which they came."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.texts: dict[str, str] = {}

    def show(self, name: str, text: str) -> None:
        """Something of the machine does not work."""
        if self.texts.get(name) != text:
            log.error("%s: %s; waiting for it to heal", name, text)
        self.texts[name] = text
        self._metrics.fault(name, on=True)

    def heal(self, *names: str) -> None:
        """It works, perhaps again."""
        for name in names:
            if self.texts.pop(name, None) is not None:
                log.info("%s: works again", name)
                self._metrics.fault(name, on=False)

    @property
    def is_blocking(self) -> bool:
        """True when no job should be started."""
        return not BLOCKING.isdisjoint(self.texts)
