"""Whether data has moved away from what the live model knows: a pure judgement of how often its threshold is passed.

Owns what counts as far above the share of false alarms that was promised, and the words for it. It is only told: a new
threshold would silence the faults as well, and whether it is the machine that has changed or a fault that lasts, nobody
here can know. etc/prometheus has the same limits, and a test holds the two together.
"""

from retraind.report import Drift

# Half a training part later, 16 of 17 labelled machines had at most 1.6 % of their rows above the threshold, up to 11
# times the share expected; where a machine had changed it was 3 to 59 % (benchmarks/RESULTS.md).
FACTOR = 10
MIN_SHARE = 0.02
# Of fewer rows one spike, which is in the view of ten rows, would be a share that looks like drift.
MIN_ROWS = 1000


def has_drifted(drift: Drift) -> bool:
    """Whether so many rows are above the threshold, and of so many, that it is no chance and no single fault."""
    share = alarm_share(drift)
    return drift.num_rows >= MIN_ROWS and share > MIN_SHARE and share > FACTOR * drift.expected_share


def alarm_share(drift: Drift) -> float:
    """From 0 to 1, whatever numbers a worker sends."""
    return max(0, min(drift.num_alarms, drift.num_rows)) / max(drift.num_rows, 1)


def told(drift: Drift) -> str:
    """In words, with the figures."""
    found, expected = (f"{100 * share:.3g} %" for share in (alarm_share(drift), drift.expected_share))
    return (
        f"{found} of {drift.num_rows:,} rows are above the threshold of version {drift.version}, which was live; "
        f"{expected} were expected"
    )
