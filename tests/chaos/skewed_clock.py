"""`retraind` in a process whose wall clock is wrong by as many seconds as the file CHAOS_CLOCK says at each moment.

The machine's clock is left alone, and so is the monotonic one, as when somebody sets the time.
"""

import datetime as dt
import os
import sys
import time
from pathlib import Path

from retraind import cli
from retraind.supervisor import main  # noqa: F401  every module that asks for the time is there before its clock is set

_clock = Path(os.environ["CHAOS_CLOCK"])
_true_time = time.time


def skewed_time() -> float:
    return _true_time() + float(_clock.read_text())


class SkewedDatetime(dt.datetime):
    """Gives plain datetimes, so that what is written down is of the type it should be."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:
        return dt.datetime.fromtimestamp(skewed_time(), tz)


time.time = skewed_time
for name, module in list(sys.modules.items()):
    if name.startswith("retraind.supervisor") and getattr(module, "datetime", None) is dt.datetime:
        module.datetime = SkewedDatetime
sys.exit(cli.main())
