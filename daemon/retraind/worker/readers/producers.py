"""Columns that are no metric although they hold numbers, by the producers that are known to write such.

Owns the columns that tell whose a record is: a GPU, a proxy, a processor. To read the records of two GPUs as one series
would be a model of neither, so that is refused: DataError unsupported_format, by what the sample shows. Where they are
all of one thing such a column is left out as `identity`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retraind.errors import DataError
from retraind.worker.readers.records import Record


@dataclass(frozen=True)
class Producer:
    """A tool, known by the names in its header; `identities` tell whose a record is, `times` belong to its time."""

    name: str
    wrote: Callable[[Sequence[str]], bool]
    identities: frozenset[str]
    times: frozenset[str]
    whose: str
    remedy: str


# Names as "power.draw [W]", with their unit also where the cells have none, and the commonest that have no unit.
NVIDIA_NAME = re.compile(r"[a-z]+\.[a-z._]+ \[(?:%|MiB|W|MHz)\]|temperature\.gpu")
NVIDIA_IDENTITIES = (
    "index",
    "uuid",
    "gpu_uuid",
    "serial",
    "gpu_serial",
    "pci.bus_id",
    "gpu_bus_id",
    "name",
    "gpu_name",
)
SADF_IDENTITIES = (
    "hostname",
    "CPU",
    "INTR",
    "TTY",
    "DEV",
    "IFACE",
    "FCHOST",
    "FAN",
    "TEMP",
    "IN",
    "BAT",
    "BUS",
    "DEVICE",
)
PRODUCERS = (
    Producer(
        name="nvidia-smi",
        wrote=lambda names: any(NVIDIA_NAME.fullmatch(name) for name in names),
        identities=frozenset(NVIDIA_IDENTITIES),
        times=frozenset(),
        whose="GPUs",
        remedy="log timestamp and index too: nvidia-smi --query-gpu=timestamp,index,... --format=csv -l 1",
    ),
    Producer(
        name="HAProxy",
        wrote={"pxname", "svname"}.issubset,
        identities=frozenset({"pxname", "svname"}),
        times=frozenset(),
        whose="proxies and servers",
        remedy="collect the rows of one proxy and server over time, for example of a backend, into a file of its own",
    ),
    Producer(
        name="sadf",
        wrote={"hostname", "interval", "timestamp"}.issubset,
        identities=frozenset({*SADF_IDENTITIES, "FILESYSTEM"}),
        times=frozenset({"interval"}),
        whose="hosts, processors or devices",
        remedy="export all as JSON: sadf -j FILE -- -A; or a table of one record per time stamp: sadf -d FILE -- -u",
    ),
)


def kinds_by_producer(names: Sequence[str], data: Sequence[Record]) -> dict[str, str]:
    """The kinds `identity` and `time` of the columns that a known producer writes beside its metrics.

    Raises DataError unsupported_format if the sample has records of more than one thing.
    """
    kinds: dict[str, str] = {}
    for producer in PRODUCERS:
        if producer.wrote(names):
            positions = [index for index, name in enumerate(names) if name in producer.identities]
            _check_one_owner(producer, names, positions, data)
            kinds |= {names[index]: "identity" for index in positions}
            kinds |= dict.fromkeys(producer.times, "time")
    return kinds


def _check_one_owner(producer: Producer, names: Sequence[str], positions: list[int], data: Sequence[Record]) -> None:
    header = [names[index] for index in positions]
    whose: list[str] = []
    for record in data:
        owner = [record.cells[index].strip() for index in positions]
        if owner == header:  # once more, where files were joined
            continue
        whose = whose or owner
        if owner != whose:
            raise DataError(
                "unsupported_format",
                f"{producer.name} wrote records of several {producer.whose} in turn",
                line=record.line,
                remedy=producer.remedy,
            )
