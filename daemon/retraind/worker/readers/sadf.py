"""The report of sysstat's `sadf -j` to rows: one entry of the statistics is one row.

Owns the names: the path of a number, joined by points, where an element of a list stands by its first value (the cpu,
the device, the interface): `cpu-load.all.usr`, `network.net-dev.eth0.rxkB`. Text is listed and not used. Entries have
their own times, so only equal ones are one row. Raises DataError malformed, no_rows, and what `document` raises.
"""

import re

import msgspec

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.printable import printable
from retraind.worker.readers.document import decode, read_document
from retraind.worker.readers.pivot import SeriesReader
from retraind.worker.readers.samples import Samples
from retraind.worker.readers.source import Source
from retraind.worker.readers.timestamps import Clock

# What is plugged in, by numbers that are no names: nothing that is measured.
INVENTORY = "usb-devices"
BEGINNING = re.compile(r'\{\s*"sysstat"\s*:\s*\{')


class _Host(msgspec.Struct):
    nodename: str = ""
    statistics: list[msgspec.Raw] = []


class _Sysstat(msgspec.Struct):
    hosts: list[_Host]


class _Report(msgspec.Struct):
    sysstat: _Sysstat


class _Timestamp(msgspec.Struct):
    date: str
    time: str


class _Entry(msgspec.Struct):
    timestamp: _Timestamp


def is_report(text: str) -> bool:
    """Whether a document begins as a report of sadf."""
    return bool(BEGINNING.match(text))


def read_report(source: Source, limits: DataConfig) -> SeriesReader:
    """Holds the document, and decodes it entry by entry."""
    hosts = decode(read_document(source, "write one day a file"), _Report).sysstat.hosts
    if len(hosts) != 1:
        raise DataError(
            "malformed", f"the report is of {len(hosts)} hosts; one is expected", remedy="write one file a host"
        )
    samples, clock = Samples(limits), Clock()
    for index, part in enumerate(hosts[0].statistics):
        what = f"entry {index} of the statistics"
        moment = decode(part, _Entry, what).timestamp
        try:
            instant = clock.instant(f"{moment.date} {moment.time}")
        except ValueError as error:
            raise DataError("malformed", f"{what}: {error}", remedy="write it anew with sadf -j") from error
        entry = decode(part, dict[str, object], what)
        entry.pop("timestamp")
        _add(entry, "", instant, samples)
        source.read(0)  # reads nothing, but says that we are alive
    return SeriesReader("sadf", source, samples, exact=True)


def _add(value: object, path: str, instant: int, samples: Samples) -> None:
    """The numbers below a path. Depth is bounded by what the decoder takes."""
    if isinstance(value, dict):
        for key, item in value.items():
            _add("" if key == INVENTORY else item, f"{path}.{key}" if path else key, instant, samples)
    elif isinstance(value, list):
        identities = set()
        for element in value:
            identity, rest = _identified(element, path)
            if identity in identities:
                raise DataError(
                    "malformed",
                    printable(f"{path[:80]} lists {identity[:60]} twice"),
                    remedy="select what is listed once: sadf -j -- -u",
                )
            identities.add(identity)
            _add(rest, f"{path}.{identity}", instant, samples)
    elif type(value) in {int, float}:
        samples.add(samples.code(path, 0), instant, float(value), 0)  # type: ignore[arg-type]
    elif value is not None:
        samples.add_text(path, 0)


def _identified(element: object, path: str) -> tuple[str, dict[str, object]]:
    """What an element of a list is about, and what is said of it."""
    if not isinstance(element, dict) or not element or isinstance(first := next(iter(element.values())), list | dict):
        raise DataError(
            "malformed", printable(f"{path[:80]} lists things without a name"), remedy="write it anew with sadf -j"
        )
    return str(first), dict(list(element.items())[1:])
