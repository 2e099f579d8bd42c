"""`retraind check` and `retraind preflight`: would the service start, would a job run? Changes nothing, but for the
lock in state.dir that keeps a second probe from a driver that hangs, where there is a GPU.

`check` reads the configuration and the web configuration and looks at every path, the port and the worker's
interpreter; `preflight` asks the host and the GPU the questions that are asked again before every job.
"""

import ipaddress
import os
import shutil
import socket
from pathlib import Path

from retraind.commands import interpreter, screen
from retraind.config import Config, split_address
from retraind.errors import ConfigError, HostError
from retraind.locks import is_locked
from retraind.report import Check
from retraind.supervisor import web_guard
from retraind.supervisor.account import folded, marked_gpus
from retraind.worker import preflight as worker_preflight

# A job would not be started.
EXIT_DEFERRED = 2


def check(config: Config, config_path: Path | None, *, as_json: bool) -> int:
    """0 when the service would start and a worker would run, 69 when not; a bad file has ended with 78 before."""
    checks = [
        Check(name="config", status="pass", message=str(config_path or "built-in defaults")),
        _check_directory("spool.dir", config.spool.dir),
        _check_directory("models.dir", config.models.dir),
        _check_directory("state.dir", config.state.dir),
        _check_port(config),
        _check_web_config(config),
        interpreter.check(config),
        *_check_programs(config),
    ]
    _print(checks, as_json=as_json)
    return HostError.exit_status if any(item.status == "fail" for item in checks) else 0


def _check_directory(name: str, path: Path) -> Check:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        return Check(name=name, status="fail", message=f"{existing} is not a directory", remedy="move it away")
    if not os.access(existing, os.W_OK | os.X_OK):
        message = f"{existing} is not writable by this user"
        return Check(name=name, status="fail", message=message, remedy="check its owner, or run as the service's user")
    what = str(path) if existing == path else f"{path} will be made"
    return Check(name=name, status="pass", message=what)


def _check_port(config: Config) -> Check:
    address = config.metrics.listen
    host, port = split_address(address)
    if is_locked(config.state.dir / ".lock"):
        return Check(name="metrics.listen", status="skip", message=f"{address}: the service is running")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            message = f"{address}: {error.strerror}"
            return Check(name="metrics.listen", status="fail", message=message, remedy="see `ss -ltnp`")
    return Check(name="metrics.listen", status="pass", message=address)


def _check_web_config(config: Config) -> Check:
    name, path = "metrics.web_config", config.metrics.web_config
    if path is not None:
        try:
            return Check(name=name, status="pass", message=f"{path}: {web_guard.check(path)}")
        except ConfigError as error:
            remedy = 'mend it: retraind would not start; see "Securing the endpoint" in OPERATIONS.md'
            return Check(name=name, status="fail", message=error.message, remedy=remedy)
    host, _ = split_address(config.metrics.listen)
    if _is_loopback(host):
        return Check(name=name, status="skip", message="none: plain HTTP, for this machine only")
    message = f"none: whoever reaches {config.metrics.listen} can read the metrics"
    return Check(name=name, status="warn", message=message, remedy="set metrics.web_config, or listen on 127.0.0.1")


def _check_programs(config: Config) -> list[Check]:
    """The operator's programs, those that are asked for: whether this user could start them. Runs none."""
    checks = []
    for key, command in (("publish.hook", config.publish.hook), ("publish.sign", config.publish.sign)):
        if command and shutil.which(command[0]) is None:
            message = f"{command[0]} is not there, or can not be executed by this user"
            checks.append(Check(name=key, status="fail", message=message, remedy="check its path and mode"))
        elif command:
            checks.append(Check(name=key, status="pass", message=command[0]))
    return checks


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # of other names only the resolver knows


def preflight(config: Config, *, as_json: bool) -> int:
    """0 when all is well, 1 with a warning or something unknown, 2 when a job would be deferred."""
    work_dir = next(path for path in (config.state.dir, *config.state.dir.parents) if path.is_dir())
    found = worker_preflight.run(config.device, work_dir, config.state.dir, config.training, config.preflight)
    python = interpreter.check(config)
    checks = [*found.checks, python]
    if as_json:
        screen.print_json({"checks": checks, "gpus": found.gpus, "fallback": found.fallback})
    else:
        _print(folded(checks), as_json=False)
        _print_gpus(found)
    if python.status == "fail" or found.bad_host or (found.bad_gpu and not found.fallback):
        return EXIT_DEFERRED
    return int(any(item.status in ("warn", "unknown", "fail") for item in checks))


def _print_gpus(found: worker_preflight.Found) -> None:
    """The figures of each GPU, also when all is well; the one that a job would have is marked."""
    if found.gpus:
        screen.print_heading("GPUs")
        screen.print_facts(marked_gpus(found.gpus))
    if found.fallback:
        screen.print_heading("Jobs run on the CPU")
        screen.print_line(found.fallback)


def _print(checks: list[Check], *, as_json: bool) -> None:
    if as_json:
        screen.print_json({"checks": checks})
        return
    rows = [(item.name, item.status, item.message + (f". {item.remedy}" if item.remedy else "")) for item in checks]
    screen.print_table(("CHECK", "STATUS", "FOUND"), rows)
