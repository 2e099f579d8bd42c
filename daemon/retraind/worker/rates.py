"""Counters to rates per second: which metrics are counters, and what becomes of resets, gaps and the first row.

Owns the rules. A counter that falls was reset: it counts from 0 again. A rate is over the time since the counter's last
value, so a gap makes it coarser and never wrong; the first value has no rate, nor has one whose time does not go on.
Raises DataError missing_columns where a rate is asked for and rows have no time stamps.
"""

# N rows of a block, D metrics, C counters
# ruff: noqa: N803, N806  (arrays carry their shape)

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from retraind.config import DataConfig
from retraind.errors import DataError
from retraind.worker.readers.columns import listed

Floats = NDArray[np.float64]

# A counter falls when its program starts anew. What falls more often, by its share of the steps, is none.
MAX_RESET_SHARE = 0.01


def counters_of(metric_names: Sequence[str], limits: DataConfig) -> tuple[list[str], list[str]]:
    """The metrics that are counters by the configuration, and those that are if their values are a counter's."""
    pinned = [name for name in metric_names if limits.schema.get(name) == "counter"]
    bases = {name.partition("{")[0] for name in metric_names}
    named = [name for name in metric_names if name not in limits.schema and _is_named_so(name, bases)]
    if limits.counters == "rate":
        return pinned + named, []
    return pinned, named if limits.counters == "auto" else []


def _is_named_so(name: str, bases: set[str]) -> bool:
    """As Prometheus names counters. `_sum` and `_count` are counters where they belong together."""
    base, _, labels = name.partition("{")
    if base.endswith("_total"):
        return True
    if base.endswith("_bucket"):
        return 'le="' in labels
    stem = base.removesuffix("_sum").removesuffix("_count")
    return stem != base and {f"{stem}_sum", f"{stem}_count"} <= bases


class Rates:
    """The counters of one dataset, whose blocks come in the order of the rows."""

    def __init__(self, metric_names: Sequence[str], counters: Sequence[str], perhaps: Sequence[str] = ()) -> None:
        """Which of `perhaps` are counters is decided by the first block: `names` are all of them until then."""
        self._places = {name: place for place, name in enumerate(metric_names)}
        self._perhaps = frozenset(perhaps)
        self.names = [name for name in metric_names if name in self._perhaps.union(counters)]
        self._last = dict.fromkeys(self.names, (np.nan, np.nan))
        self._is_first = True

    def of(self, rows_ND: Floats, seconds_N: Floats) -> Floats:
        """The rows with each counter's rate in its place."""
        if self._is_first and len(rows_ND):
            self._is_first = False
            self._decide(rows_ND, seconds_N)
        if not self.names or not len(rows_ND):
            return rows_ND
        rows_ND = rows_ND.copy()
        for name in self.names:
            place = self._places[name]
            rows_ND[:, place] = self._rate(name, rows_ND[:, place], seconds_N)
        return rows_ND

    def _rate(self, name: str, values_N: Floats, seconds_N: Floats) -> Floats:
        is_known_N = np.isfinite(values_N) & np.isfinite(seconds_N)
        last_value, last_second = self._last[name]
        values = np.append(last_value, values_N[is_known_N])
        seconds = np.append(last_second, seconds_N[is_known_N])
        self._last[name] = values[-1], seconds[-1]
        gains, spans = np.diff(values), np.diff(seconds)
        gains = np.where(gains < 0, values[1:], gains)
        rates_N = np.full(len(values_N), np.nan)
        rates_N[is_known_N] = np.divide(gains, spans, out=np.full(len(gains), np.nan), where=spans > 0)
        return rates_N

    def _decide(self, rows_ND: Floats, seconds_N: Floats) -> None:
        has_times = bool(np.isfinite(seconds_N).any())
        asked = [name for name in self.names if name not in self._perhaps]
        if asked and not has_times:
            raise DataError(
                "missing_columns",
                f"rates per second of {listed(asked)} need time stamps, and the rows have none that can be read",
                remedy="write ISO 8601, or seconds since 1970, into a column named time or given by data.schema",
            )
        self.names = [
            name
            for name in self.names
            if name not in self._perhaps or (has_times and _rises(rows_ND[:, self._places[name]]))
        ]


def _rises(values_N: Floats) -> bool:
    """Whether a column is one of a counter: not below 0, and it falls hardly ever."""
    present = values_N[np.isfinite(values_N)]
    num_falls = int((np.diff(present) < 0).sum())
    return bool((present >= 0).all()) and num_falls <= max(1, MAX_RESET_SHARE * len(present))
