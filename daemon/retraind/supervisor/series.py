"""Kinds of metric in one registry, and its exposition. The only importer of prometheus_client.

Every name gets the prefix retraind_. Series with labels from closed sets stand at 0 from the start, so that a rate is
right from the first event; those that come and go are replaced whole, so that a scrape sees one moment. Knows nothing
of what is measured: that is metrics.py.
"""

import gzip
from collections.abc import Iterator, Mapping
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

# The values of each label, in the order in which the labels are named.
Labels = Mapping[str, tuple[str, ...]]

# From a file of 300 rows to a day of training.
_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0, 14_400.0, 86_400.0)

# More than any count that is meant: a number of a worker gone mad must end neither the loop nor every later scrape.
_MAX_NUMBER = 2.0**63

disable_created_metrics()  # type: ignore[no-untyped-call]


class OptionalGauges(Collector):
    """Gauges that are there only while they have a value. The dict is replaced whole: a scrape sees one moment."""

    def __init__(self, subject: str, texts: Mapping[str, str]) -> None:
        self._subject, self._texts = subject, texts
        self.values: Mapping[str, float] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        values = self.values
        for name, text in self._texts.items():
            if name in values:
                yield GaugeMetricFamily(f"retraind_{self._subject}_{name}", text, value=values[name])


class ChangingSeries(Collector):
    """A gauge whose series come and go, by their label values. The dict is replaced whole: none is seen half made."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._name, self._text, self._labels = f"retraind_{name}", text, labels
        self.values: Mapping[tuple[str, ...], float] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for label_values, value in self.values.items():
            family.add_metric(label_values, value)
        yield family


class Registry:
    """Makes series of each kind, in the order in which they are shown; `render` is what a scrape gets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

    def info(self, name: str, text: str, **labels: str) -> None:
        """A series that is 1 for as long as the process lives."""
        gauge = Gauge(f"retraind_{name}", text, tuple(labels), registry=self.registry)
        gauge.labels(**labels).set(1)

    def gauge(self, name: str, text: str, labels: Labels | None = None) -> Gauge:
        gauge = Gauge(f"retraind_{name}", text, tuple(labels or ()), registry=self.registry)
        for values in _combinations(labels):
            gauge.labels(*values).set(0)
        return gauge

    def counter(self, name: str, text: str, labels: Labels | None = None) -> Counter:
        counter = Counter(f"retraind_{name}", text, tuple(labels or ()), registry=self.registry)
        for values in _combinations(labels):
            counter.labels(*values)
        return counter

    def histogram(self, name: str, text: str, labels: Labels | None = None) -> Histogram:
        histogram = Histogram(f"retraind_{name}", text, tuple(labels or ()), buckets=_SECONDS, registry=self.registry)
        for values in _combinations(labels):
            histogram.labels(*values)
        return histogram

    def optional(self, subject: str, texts: Mapping[str, str]) -> OptionalGauges:
        gauges = OptionalGauges(subject, texts)
        self.registry.register(gauges)
        return gauges

    def changing(self, name: str, text: str, *labels: str) -> ChangingSeries:
        series = ChangingSeries(name, text, labels)
        self.registry.register(series)
        return series

    def render(self, accept: str, accept_encoding: str) -> tuple[bytes, str, str | None]:
        """Body, content type and content encoding for a scrape's Accept and Accept-Encoding headers."""
        try:
            encoder, content_type = choose_encoder(accept if accept.isprintable() else "")
        except (TypeError, ValueError):  # "version=x": the library compares its parts as numbers
            encoder, content_type = choose_encoder("")
        body = encoder(self.registry)
        if _takes_gzip(accept_encoding):
            return gzip.compress(body, compresslevel=1), content_type, "gzip"
        return body, content_type, None


def _combinations(labels: Labels | None) -> Iterator[tuple[str, ...]]:
    """Every choice of one value a label; none without labels, where the one series is there by itself."""
    return product(*labels.values()) if labels else iter(())


def _takes_gzip(accept_encoding: str) -> bool:
    """RFC 9110: a weight of 0 means "not this one"."""
    for coding in accept_encoding.lower().replace(" ", "").split(","):
        name, _, weight = coding.partition(";")
        if name == "gzip":
            return weight.rstrip("0.") != "q="
    return False


def bounded(number: float) -> float:
    """A number of a worker as one that every client can read."""
    return float(min(max(number, 0), _MAX_NUMBER))
