"""A headless Chromium that is asked through a pair of pipes: what a page asks for, complains of and measures.

Its own protocol over file descriptors 3 and 4, JSON ended by NUL: nothing to install but the browser, no port, and a
profile that is thrown away. Every wait has a deadline.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Self

SECONDS = 90
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    """The path of a browser, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page at a time; `events` is all that the browser told of it since it was opened."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="retraind-browser-", ignore_cleanup_errors=True)
        (its_in, self._out), (self._in, its_out) = os.pipe(), os.pipe()
        # Above 3 and 4, so that neither is overwritten before it is moved there.
        its_in, its_out = (_moved(fd) for fd in (its_in, its_out))
        silent = os.open(os.devnull, os.O_RDWR)
        arguments = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}",
        ]  # fmt: skip
        moves = [(os.POSIX_SPAWN_DUP2, *pair) for pair in ((silent, 1), (silent, 2), (its_in, 3), (its_out, 4))]
        self._pid = os.posix_spawn(program, arguments, os.environ, file_actions=moves, setsid=True)
        for fd in (its_in, its_out, silent):
            os.close(fd)
        self._buffer, self._last_id, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._pid, signal.SIGKILL)  # with all that it has started, which write to its profile
        os.waitpid(self._pid, 0)
        for fd in (self._in, self._out):
            os.close(fd)
        self._profile.cleanup()

    def open(self, url: str, *, width: int, height: int = 800, scheme: str = "light") -> None:
        """Shows a page in a new tab of this size and colour scheme, and waits until it is loaded."""
        self._session, self.events = "", []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime", "Audits"):
            self.ask(f"{domain}.enable")
        is_phone = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=url)
        until = time.monotonic() + SECONDS
        while not self.seen("Page.loadEventFired"):
            self._read(until)

    def ask(self, method: str, **params: object) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._read(until)
            if answer.get("id") == self._last_id:
                assert "result" in answer, answer
                return dict(answer["result"])

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives in the page: the tool's own, which no policy of the page forbids."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def seen(self, method: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event["params"] for event in self.events if event["method"] == method]

    def picture(self, path: Path) -> None:
        """The whole page as a PNG, for people."""
        answer = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            assert left > 0, "the browser does not answer"
            assert select.select([self._in], [], [], left)[0], "the browser does not answer"
            data = os.read(self._in, 2**20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = dict(json.loads(line))
        if "method" in message:
            self.events.append(message)
        return message


def _moved(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved
