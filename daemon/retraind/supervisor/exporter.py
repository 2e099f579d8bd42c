"""The HTTP endpoint: /metrics, /-/healthy, /-/ready and a landing page, in threads that change nothing.

A slow or idle client never blocks a scrape: each connection has a time-out a read and a deadline in all, their number
is bounded, and when it is reached the oldest one makes room. Raises OSError for an address that can not be bound.
"""

import html
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from retraind import __version__
from retraind.config import split_address

Render = Callable[[str, str], tuple[bytes, str, str | None]]
Question = Callable[[], tuple[bool, str]]

# Prometheus gives up after 10 s by default; whoever takes longer to send a request is not a scraper.
_READ_SECONDS = 5.0
_DEADLINE_SECONDS = 15.0
# A thread each; a scrape takes milliseconds, so more than this are idle or hostile.
_MAX_CONNECTIONS = 64
_TEXT = "text/plain; charset=utf-8"
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>retraind</title>
<meta name="viewport" content="width=device-width">
<style>body {{ font: 16px/1.5 sans-serif; max-width: 40em; margin: 2em auto; padding: 0 1em }}</style></head>
<body><h1>retraind {version}</h1><p>{text}</p><ul>
<li><a href="/metrics">/metrics</a>: for Prometheus</li>
<li><a href="/-/ready">/-/ready</a>: 200 when a dropped file would be trained and published</li>
<li><a href="/-/healthy">/-/healthy</a>: 200 while the service's loop turns</li>
</ul></body></html>
"""


class Exporter:
    """The endpoint; what it answers is asked of the functions that it is given."""

    def __init__(self, render: Render, is_healthy: Question, is_ready: Question, landing: Callable[[], str]) -> None:
        self._answers = _Answers(render, is_healthy, is_ready, landing)
        self._server: _Server | None = None

    def start(self, address: str) -> tuple[str, int]:
        """Binds and serves; the host and port that were bound. Raises OSError."""
        host, port = split_address(address)
        self._server = _Server((host, port), self._answers)
        threading.Thread(target=self._server.serve_forever, name="exporter", daemon=True).start()
        bound = self._server.server_address
        return str(bound[0]), int(bound[1])

    def stop(self) -> None:
        """Frees the port at once."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Answers:
    def __init__(self, render: Render, is_healthy: Question, is_ready: Question, landing: Callable[[], str]) -> None:
        self.render, self.landing = render, landing
        self.questions = {"/-/healthy": is_healthy, "/-/ready": is_ready}


class _Server(ThreadingHTTPServer):
    # Connections that wait for `accept`: with the default of 5, a burst of idle clients delays a scrape by seconds.
    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], answers: _Answers) -> None:
        self.answers = answers
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Makes room first: what is too old goes, and the oldest when there are too many."""
        now = time.monotonic()
        with self._lock:
            by_age = sorted(self._open, key=self._open.__getitem__)
            num_excess = max(0, len(by_age) - _MAX_CONNECTIONS + 1)
            for position, old in enumerate(by_age):
                if position < num_excess or now - self._open[old] > _DEADLINE_SECONDS:
                    _cut_off(old)
                    del self._open[old]
            self._open[request] = now
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


def _cut_off(connection: socket.socket) -> None:
    """Wakes the thread that waits for this client: its read ends."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _READ_SECONDS
    server_version = f"retraind/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def __getattr__(self, name: str) -> Any:
        # http.server asks for do_<METHOD> and answers 501 when there is none; a method that exists elsewhere is 405.
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def _refuse_method(self) -> None:
        self._send(405, f"{self.command[:20]} is not supported, GET and HEAD are\n", {"Allow": "GET, HEAD"})

    def _answer(self, *, with_body: bool) -> None:
        answers = self.server.answers
        path = self.path.partition("?")[0]
        if path == "/metrics":
            accept, encodings = self.headers.get("Accept", ""), self.headers.get("Accept-Encoding", "")
            body, content_type, encoding = answers.render(accept, encodings)
            headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
            self._send(200, body, headers | ({"Content-Encoding": encoding} if encoding else {}), with_body=with_body)
        elif path in answers.questions:
            holds, why = answers.questions[path]()
            self._send(200 if holds else 503, f"{why}\n", with_body=with_body)
        elif path == "/":
            page = _PAGE.format(version=__version__, text=html.escape(answers.landing()))
            self._send(200, page, {"Content-Type": "text/html; charset=utf-8"}, with_body=with_body)
        else:
            self._send(404, "not here: see /\n", with_body=with_body)

    def _send(
        self, status: int, body: str | bytes, headers: dict[str, str] | None = None, *, with_body: bool = True
    ) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in {"Content-Type": _TEXT, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Scrapes come every few seconds and are not worth a line."""
