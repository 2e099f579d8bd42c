"""Which columns of a dataset the operator wants, and to which list of metrics it is held. No I/O, no clock.

Owns what of the configuration decides a model's metrics, beside the data.
"""

from typing import Literal

import msgspec

from retraind.config import ColumnKind, DataConfig


class ColumnRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of `data` chooses metrics. Versions of earlier releases have the defaults, which chose as they did."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    schema: dict[str, ColumnKind] = {}
    counters: Literal["raw", "rate", "auto"] = "raw"


class HeldTo(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics that a dataset must have, those of them that are rates, and the version whose they are."""

    version: str
    metric_names: list[str]
    rate_metrics: list[str] = []


def rules_of(data: DataConfig) -> ColumnRules:
    """The rules that the configuration has now."""
    return ColumnRules(include=data.include, exclude=data.exclude, schema=data.schema, counters=data.counters)
