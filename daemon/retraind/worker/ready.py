"""A worker without a job yet: imports what every job needs, says so, and waits for its one order.

Standard input is its control channel, a socket: `ready` goes up, the path of an order comes down, and its end means
that no job will come. Opens no dataset and no CUDA context: what a job says of its device is still free to decide.
Raises OSError when standard input is no such channel, ImportError or OSError for a library that can not be loaded.
"""

import importlib
import os
import socket
from pathlib import Path

from retraind.events import READY_LINE

# What a job on a CPU loads in the course of its life; readers of rarer formats are left to those who need them.
_MODULES = (
    "torch",
    "pandas",
    "retraind.worker.ingest",
    "retraind.worker.readers.delimited",
    "retraind.worker.evaluate",
    "retraind.worker.train",
    "retraind.worker.compare",
)
_READ_BYTES = 2**12


def wait_for_order() -> Path | None:
    """The path of the one order, or None when there will be none. From here on standard input is empty."""
    with socket.socket(fileno=os.dup(0)) as channel:
        for module in _MODULES:
            importlib.import_module(module)
        channel.sendall(READY_LINE)
        path = b""
        while not path.endswith(b"\n"):
            block = channel.recv(_READ_BYTES)
            if not block:
                return None
            path += block
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)  # as it is for a worker that was started for its job
    os.close(null)
    return Path(os.fsdecode(path[:-1]))
