"""What a client must show, as the web configuration on disk says now: read again when a file of it has changed.

One look is a few stat calls a connection. What is broken, half written or weaker than what is in force is told once in
the log and as a metric, and what was in force stays: the endpoint never opens up by itself. Never talks to a client.
Raises ConfigError at the start only.
"""

import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from retraind import web_config_file
from retraind.errors import ConfigError
from retraind.supervisor.web_passwords import Logins, Passwords, make_passwords
from retraind.supervisor.web_tls import make_context
from retraind.web_config import WebConfig

log = logging.getLogger(__name__)

# A file that was changed within this time before it was read may be changed again without a new time: the kernel
# counts file times in ticks of up to 10 ms.
_SETTLED_NS = 100_000_000
# A problem that no file's change will end, such as too many open files, is looked at again so often.
_RETRY_SECONDS = 10.0
# A look takes microseconds and reading anew milliseconds. On a disk that hangs one thread hangs, and not every client.
_LOOK_SECONDS = 1.0

# Change of anything, a chmod too; change of the content, which a copy may set at will; size; inode and its device. None
# for a file that is not there.
Look = tuple[int, int, int, int, int] | None


@dataclass(frozen=True)
class Access:
    """One web configuration, ready for use."""

    config: WebConfig
    context: ssl.SSLContext | None
    passwords: Passwords | None
    headers: Mapping[str, str]
    allowed_names: tuple[str, ...] | None


OPEN = Access(WebConfig(), None, None, {}, None)  # without a web configuration


class Guard:
    """Reads the file at the start, which may raise ConfigError, and whenever it must."""

    def __init__(self, path: Path, tell: Callable[[bool], None]) -> None:
        self._path, self._tell = path, tell
        self._logins = Logins()
        self._lock = threading.Lock()
        self._looks: dict[Path, Look] = {}  # of the files of the last try, from before they were read
        self._is_settled = True
        self._problem = ""
        self._retry_at = 0.0
        self._access = self._read(None)

    def access(self) -> Access:
        """What holds for a connection that is made now. Never raises for what is on disk."""
        if not self._lock.acquire(timeout=_LOOK_SECONDS):
            return self._access
        try:
            looks = {path: _look(path) for path in self._looks}
            if looks != self._looks or not self._is_settled or (self._problem and time.monotonic() > self._retry_at):
                self._refresh(is_changed=looks != self._looks)
            return self._access
        finally:
            self._lock.release()

    def _refresh(self, *, is_changed: bool) -> None:
        try:
            self._access = self._read(self._access.config)
        except ConfigError as error:
            problem = error.message.replace("\n", "; ")
            if problem != self._problem:
                log.error("metrics.web_config: can not be used, what is in force stays: %s", problem)
            self._problem, self._retry_at = problem, time.monotonic() + _RETRY_SECONDS
            self._tell(False)
            return
        if self._problem or is_changed:
            log.info("metrics.web_config: %s is in force as it is on disk", self._path)
        self._problem = ""
        self._tell(True)

    def _read(self, in_force: WebConfig | None) -> Access:
        looks = {self._path: _look(self._path)}
        try:
            config, problems = web_config_file.read(self._path)
            looks |= {path: _look(path) for path in config.files()}
            tls, users = config.tls_server_config, config.basic_auth_users
            context = make_context(tls, problems) if tls is not None else None
            passwords = make_passwords(users, self._logins, problems) if users else None
            if in_force is not None and not problems.found:
                for key in sorted(in_force.protections() - config.protections()):
                    problems.add_at(key, "kept clients out and does so no more: restart retraind if that is meant")
            problems.raise_if_any()
        finally:
            self._looks = looks
            changed_ns = max((look[0] for look in looks.values() if look), default=0)
            self._is_settled = changed_ns < time.time_ns() - _SETTLED_NS
        names = tls.client_allowed_sans if tls is not None else None
        return Access(config, context, passwords, config.http_server_config.headers.given(), names)


def _look(path: Path) -> Look:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


def describe(config: WebConfig) -> str:
    """What it asks of clients, in words."""
    tls, num_users = config.tls_server_config, len(config.basic_auth_users)
    words = ["plain HTTP" if tls is None else "TLS"]
    if tls is not None and tls.client_auth_type != "NoClientCert":
        words.append("client certificates " + ("if given" if tls.client_auth_type.endswith("IfGiven") else "required"))
    if num_users:
        words.append(f"{num_users} user{'s' * (num_users > 1)}")
    return ", ".join(words)


def check(path: Path) -> str:
    """What the file asks of clients, in words, when it can be used as a whole. Raises ConfigError."""
    return describe(Guard(path, lambda _: None).access().config)
