"""The HTTP endpoint: /metrics, /-/healthy, /-/ready and a landing page, in threads that change nothing.

A slow or idle client never blocks a scrape: each connection has a time-out a read and a deadline in all, their number
is bounded, and when it is reached the oldest one that has not asked yet makes room. With a web configuration each
connection shakes hands in its own thread under the same limits, and nothing is told to a client that has not shown
what the guard asks for. Raises OSError for an address that can not be bound.
"""

import html
import logging
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from retraind import __version__
from retraind.config import split_address
from retraind.supervisor.web_guard import OPEN, Access, Guard
from retraind.supervisor.web_passwords import Busy
from retraind.supervisor.web_tls import has_allowed_name

log = logging.getLogger(__name__)

Render = Callable[[str, str], tuple[bytes, str, str | None]]
Question = Callable[[], tuple[bool, str]]

# Prometheus gives up after 10 s by default; whoever takes longer to send a request is not a scraper.
_READ_SECONDS = 5.0
_DEADLINE_SECONDS = 15.0
# A thread each; a scrape takes milliseconds, so more than this are idle or hostile.
_MAX_CONNECTIONS = 64
_TEXT = "text/plain; charset=utf-8"
_REALM = 'Basic realm="retraind"'
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
    """The endpoint; what it answers is asked of the functions that it is given. Without a guard, by everybody."""

    def __init__(
        self,
        render: Render,
        is_healthy: Question,
        is_ready: Question,
        landing: Callable[[], str],
        guard: Guard | None = None,
    ) -> None:
        self._answers = _Answers(render, is_healthy, is_ready, landing)
        self._guard = guard
        self._server: _Server | None = None

    def start(self, address: str) -> tuple[str, int]:
        """Binds and serves; the host and port that were bound. Raises OSError."""
        host, port = split_address(address)
        self._server = _Server((host, port), self._answers, self._guard)
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

    def __init__(self, address: tuple[str, int], answers: _Answers, guard: Guard | None) -> None:
        self.answers, self._guard = answers, guard
        self._open: dict[socket.socket, float] = {}  # when it was accepted; the oldest is the first
        self._asked: set[socket.socket] = set()
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, BaseHTTPRequestHandler)  # never made: finish_request makes a _Handler

    def server_bind(self) -> None:
        """Not HTTPServer's, which asks the name service for a name: that can wait for longer than the watchdog does."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Makes room first, then answers in a thread."""
        with self._lock:
            while len(self._open) >= _MAX_CONNECTIONS:
                self._cut_off(next((one for one in self._open if one not in self._asked), next(iter(self._open))))
            self._open[request] = time.monotonic()
        arguments = (request, client_address)
        threading.Thread(
            target=self.process_request_thread, args=arguments, name="exporter-client", daemon=True
        ).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's thread: the handshake, then the request."""
        access = OPEN if self._guard is None else self._guard.access()
        if access.context is None:
            _Handler(request, client_address, self, request, access)
            return
        # A copy of the descriptor: wrapping takes it away from `request`, which is what a cut-off shuts down.
        with request.dup() as copy:
            copy.settimeout(_Handler.timeout)
            stream = access.context.wrap_socket(copy, server_side=True, do_handshake_on_connect=False)
        with stream:
            stream.do_handshake()
            if access.allowed_names is not None and not has_allowed_name(stream.getpeercert(), access.allowed_names):
                log.debug("a client whose certificate has no allowed name was let go")
                return
            _Handler(stream, client_address, self, request, access)
            stream.setblocking(False)
            with suppress(OSError, ValueError):
                stream.unwrap()  # a goodbye that waits for none

    def service_actions(self) -> None:
        """Called by serve_forever at least twice a second: cuts off what is past its deadline."""
        now = time.monotonic()
        with self._lock:
            for connection in [one for one, since in self._open.items() if now - since > _DEADLINE_SECONDS]:
                self._cut_off(connection)

    def has_asked(self, connection: socket.socket) -> None:
        """Its request is complete: it is the last to make room for others."""
        with self._lock:
            if connection in self._open:
                self._asked.add(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._forget(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            for connection in list(self._open):
                self._cut_off(connection)

    def _cut_off(self, connection: socket.socket) -> None:
        """Wakes the thread that waits for this client: its read ends."""
        self._forget(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _forget(self, connection: socket.socket) -> None:
        self._open.pop(connection, None)
        self._asked.discard(connection)

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no news; anything else is a fault of ours."""
        error = sys.exception()
        if isinstance(error, ssl.SSLError):
            log.debug("a client was let go: %s", error)
        elif not isinstance(error, OSError):
            log.error("a request to the endpoint failed", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _READ_SECONDS
    server_version = f"retraind/{__version__}"
    sys_version = ""

    def __init__(
        self, stream: Any, client_address: Any, server: _Server, accepted: socket.socket, access: Access
    ) -> None:
        """Answers one request on `stream`, which is the accepted connection itself or TLS over it."""
        self._accepted, self._access = accepted, access
        super().__init__(stream, client_address, server)

    def parse_request(self) -> bool:
        """Whether there is one to be answered: whoever may not ask is told so here, whatever he asks for."""
        if not super().parse_request():
            return False
        passwords = self._access.passwords
        if passwords is None:
            return True
        with_body = self.command != "HEAD"
        try:
            if passwords.allow(self.headers.get("Authorization", "")):
                return True
        except Busy:
            self._send(503, "too many logins at once\n", {"Retry-After": "5"}, with_body=with_body)
        else:
            self._send(401, "a name and a password are needed\n", {"WWW-Authenticate": _REALM}, with_body=with_body)
        return False

    def end_headers(self) -> None:
        for name, value in self._access.headers.items():
            self.send_header(name, value)
        super().end_headers()

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
        self.server.has_asked(self._accepted)
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
