"""Process 1 from start to stop: builds the parts, waits until they are usable, runs the loop, takes them down.

READY=1 is sent when spool, state, models directory and port are really usable. A part that is not, is tried again:
the fault stands in STATUS and in the log and heals by itself. Raises ConfigError for a configuration or a web
configuration that can not be used, HostError already_running when another service holds the spool or the state.
"""

import logging
import select
import time
from collections.abc import Callable
from pathlib import Path

from retraind import __version__, config_file, logs
from retraind.errors import HostError, RetraindError
from retraind.supervisor.exporter import Exporter
from retraind.supervisor.faults import Faults
from retraind.supervisor.ledger import Ledger
from retraind.supervisor.loop import STUCK_SECONDS, Loop
from retraind.supervisor.metrics import Metrics
from retraind.supervisor.publish import Publisher
from retraind.supervisor.schedule import backoff
from retraind.supervisor.spool import Spool
from retraind.supervisor.systemd import Systemd
from retraind.supervisor.wake import Wake
from retraind.supervisor.web_guard import OPEN, Guard, describe

log = logging.getLogger(__name__)


def serve(config_path: Path | None) -> None:
    """Runs the service until SIGTERM or SIGINT."""
    config = config_file.load(config_path)
    logs.setup(config.log.level)
    log.info("retraind %s, configuration %s", __version__, config_path or "built in")
    metrics = Metrics()
    guard = _guard(config.metrics.web_config, metrics)  # before anything is open: a mistake in it ends the service
    wake, systemd = Wake(), Systemd()
    wake.catch_signals()
    faults = Faults(metrics)
    spool, ledger = Spool(config.spool.dir), Ledger(config.state.dir)
    publisher = Publisher(config.models.dir, config.models.name)
    loop = Loop(config, config_path, spool, ledger, publisher, metrics, faults, systemd, wake)
    exporter = _exporter(loop, metrics, faults, guard)
    parts: dict[str, Callable[[], object]] = {
        "port": lambda: _listen(exporter, config.metrics.listen, guard),
        "state": ledger.open,
        "spool": spool.open,
        "models": publisher.open,
    }
    try:
        if _open(parts, faults, systemd, wake):
            loop.run()
    finally:
        exporter.stop()
        wake.close()
        systemd.close()
    log.info("stopped")


def _guard(path: Path | None, metrics: Metrics) -> Guard | None:
    """Raises ConfigError."""
    return None if path is None else Guard(path, lambda success: metrics.web_config_loaded(success=success))


def _exporter(loop: Loop, metrics: Metrics, faults: Faults, guard: Guard | None) -> Exporter:
    def is_healthy() -> tuple[bool, str]:
        age = time.monotonic() - loop.turned_at
        return age < STUCK_SECONDS, f"the loop turned {age:.0f} s ago"

    def is_ready() -> tuple[bool, str]:
        blocking = [f"{name}: {text}" for name, text in faults.texts.copy().items()] if faults.is_blocking else []
        return not blocking, "; ".join(blocking) or "ready"

    return Exporter(metrics.render, is_healthy, is_ready, lambda: loop.text, guard)


def _listen(exporter: Exporter, address: str, guard: Guard | None) -> None:
    try:
        host, port = exporter.start(address)
    except OSError as error:
        remedy = "see `ss -ltnp`, or change metrics.listen"
        raise HostError("port_taken", f"metrics.listen {address}: {error.strerror}", remedy=remedy) from error
    access = OPEN if guard is None else guard.access()
    scheme = "http" if access.context is None else "https"
    asks = "" if guard is None else f" ({describe(access.config)})"
    log.info("metrics at %s://%s:%d/metrics%s", scheme, f"[{host}]" if ":" in host else host, port, asks)


def _open(parts: dict[str, Callable[[], object]], faults: Faults, systemd: Systemd, wake: Wake) -> bool:
    """Opens every part, trying again what the machine refuses; False when a stop came first."""
    waiting = dict(parts)
    for num_tries in range(1, 2**31):
        for name, opener in list(waiting.items()):
            try:
                opener()
            except RetraindError as error:
                if error.code == "already_running":
                    raise
                faults.show(name, str(error))
            else:
                faults.heal(name)
                del waiting[name]
        if not waiting:
            return True
        pause = backoff(num_tries)
        systemd.status(f"degraded: {next(iter(faults.texts.values()))}; next try in {pause:.0f} s")
        systemd.extend_start(pause + 30)
        if _stop_asked(wake, pause, systemd):
            return False
    return False


def _stop_asked(wake: Wake, seconds: float, systemd: Systemd) -> bool:
    """Waits, answering the watchdog; True when a stop came."""
    until = time.monotonic() + seconds
    poller = select.poll()
    poller.register(wake.fd, select.POLLIN)
    while (now := time.monotonic()) < until:
        systemd.watchdog(now)
        poller.poll(min(until - now, systemd.ping_seconds or seconds) * 1000 + 1)
        if "stop" in wake.take():
            return True
    return False
