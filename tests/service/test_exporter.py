"""The endpoint against real clients: slow, idle, hostile, and Prometheus."""

import gzip
import http.client
import logging
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from harness import eventually

from retraind.supervisor import exporter
from retraind.supervisor.exporter import Exporter
from retraind.supervisor.metrics import Metrics

# What Prometheus 3 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[str, int]]]:
    started: list[Exporter] = []

    def run(address: str = "127.0.0.1:0", *, ready: bool = True) -> tuple[str, int]:
        metrics = Metrics()
        started.append(
            Exporter(metrics.render, lambda: (True, "turns"), lambda: (ready, "spool: gone"), lambda: "idle <&>")
        )
        return started[-1].start(address)

    yield run
    for one in started:
        one.stop()


def ask(address: tuple[str, int], method: str, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(*address, timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    response.body = response.read()
    connection.close()
    return response


def test_get_and_head_answer_alike_and_head_has_no_body(start) -> None:
    address = start()
    get, head = ask(address, "GET", "/metrics"), ask(address, "HEAD", "/metrics")
    assert (get.status, head.status) == (200, 200)
    assert get.headers["Content-Type"] == head.headers["Content-Type"]
    assert b"retraind_build_info" in get.body
    assert head.body == b""
    assert int(ask(address, "HEAD", "/").headers["Content-Length"]) == len(ask(address, "GET", "/").body)


@pytest.mark.parametrize("path", ["/nonsense", "/metrics/", "/-/", "/METRICS", "/..%2fetc/passwd"])
def test_any_other_path_is_404(start, path: str) -> None:
    assert ask(start(), "GET", path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "BREW"])
def test_any_other_method_is_405_and_names_those_that_work(start, method: str) -> None:
    response = ask(start(), method, "/metrics")
    assert response.status == 405
    assert response.headers["Allow"] == "GET, HEAD"


def test_ready_says_503_and_why(start) -> None:
    response = ask(start(ready=False), "GET", "/-/ready")
    assert (response.status, response.body) == (503, b"spool: gone\n")
    assert ask(start(), "GET", "/-/healthy").status == 200


def test_the_landing_page_links_to_the_rest_and_escapes_what_it_shows(start) -> None:
    page = ask(start(), "GET", "/").body.decode()
    assert '<a href="/metrics">' in page
    assert "idle &lt;&amp;&gt;" in page


def test_openmetrics_and_gzip_are_given_to_those_who_ask(start) -> None:
    address = start()
    plain = ask(address, "GET", "/metrics")
    assert plain.headers["Content-Type"].startswith("text/plain; version=")
    assert plain.headers["Content-Encoding"] is None
    other = ask(address, "GET", "/metrics", Accept="application/openmetrics-text;version=1.0.0", Accept_Encoding="gzip")
    assert other.headers["Content-Type"].startswith("application/openmetrics-text")
    assert gzip.decompress(other.body).endswith(b"# EOF\n")


def test_what_prometheus_sends_gets_openmetrics(start) -> None:
    answer = ask(start(), "GET", "/metrics", Accept=PROMETHEUS, Accept_Encoding="gzip")
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=")
    assert gzip.decompress(answer.body).endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("encodings", "encoding"),
    [
        ("gzip", "gzip"),
        ("deflate, GZIP;q=0.5", "gzip"),
        ("gzip; q=1.0", "gzip"),
        ("gzip;q=0", None),
        ("gzip; q=0.000, deflate", None),
        ("x-gzip-not", None),
        ("", None),
    ],
)
def test_gzip_is_for_those_who_take_it(start, encodings: str, encoding: str | None) -> None:
    answer = ask(start(), "GET", "/metrics", Accept_Encoding=encodings)
    assert answer.headers["Content-Encoding"] == encoding


@pytest.mark.parametrize(
    "accept",
    [
        "text/plain; version=x",
        "application/openmetrics-text; version=1.x",
        "application/openmetrics-text;",
        ";;,=",
        "application/openmetrics-text; version=1.0.0.\r\n\tSet-Cookie: a=b",
    ],
)
def test_an_accept_header_that_makes_no_sense_still_gets_metrics(start, accept: str) -> None:
    host, port = start()
    with socket.create_connection((host, port), timeout=20) as client:
        client.sendall(f"GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(2**16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 ")
    assert b"Set-Cookie" not in head
    assert b"retraind_build_info" in body


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "[::]:0", ":0"])
def test_every_form_of_an_address_is_served(start, address: str) -> None:
    try:
        _, port = start(address)
    except OSError as error:
        pytest.skip(f"{address} can not be bound here: {error}")
    host = "::1" if "::1" in address else "127.0.0.1"
    assert ask((host, port), "GET", "/-/healthy").status == 200


def test_a_taken_port_is_an_error_and_a_stopped_one_is_free_at_once(start) -> None:
    address = start()
    with pytest.raises(OSError, match="in use"):
        start(f"{address[0]}:{address[1]}")
    metrics = Metrics()
    for _ in range(3):
        one = Exporter(metrics.render, lambda: (True, ""), lambda: (True, ""), lambda: "")
        _, port = one.start("127.0.0.1:0")
        assert ask(("127.0.0.1", port), "GET", "/").status == 200
        one.stop()
        again = Exporter(metrics.render, lambda: (True, ""), lambda: (True, ""), lambda: "")
        again.start(f"127.0.0.1:{port}")
        again.stop()


def test_two_hundred_idle_and_dripping_clients_do_not_keep_a_scrape_out(start) -> None:
    address = start()
    before = threading.active_count()
    clients = []
    for number in range(200):
        client = socket.create_connection(address, timeout=20)
        if number % 2:
            client.sendall(b"GET /metrics HTTP/1.1\r\nX-Drip: ")
        clients.append(client)
    for _ in range(5):
        assert ask(address, "GET", "/metrics").status == 200
        for client in clients[1::2]:
            try:
                client.sendall(b"x")
            except OSError:
                continue  # cut off, as it should be
    eventually(lambda: threading.active_count() - before <= exporter._MAX_CONNECTIONS + 1, "threads are bounded")
    for client in clients:
        client.close()
    eventually(lambda: threading.active_count() <= before + 1, "every thread ends with its client")


def test_a_client_that_sends_nothing_is_let_go(start, monkeypatch) -> None:
    monkeypatch.setattr(exporter._Handler, "timeout", 0.2)
    with socket.create_connection(start(), timeout=20) as client:
        assert client.recv(100) == b"", "the server closes"


def test_a_client_that_drips_is_cut_off_at_the_deadline_though_nobody_else_comes(start, monkeypatch) -> None:
    monkeypatch.setattr(exporter, "_DEADLINE_SECONDS", 0.3)
    with socket.create_connection(start(), timeout=20) as client:

        def is_cut_off() -> bool:
            try:
                client.sendall(b"G")
            except OSError:
                return True
            return False

        eventually(is_cut_off, "the drip ends")


def test_the_oldest_client_that_has_not_asked_makes_room_before_one_that_is_being_answered(monkeypatch) -> None:
    monkeypatch.setattr(exporter, "_MAX_CONNECTIONS", 2)
    is_asked, may_answer = threading.Event(), threading.Event()

    def landing() -> str:
        is_asked.set()
        assert may_answer.wait(20)
        return "answered after all"

    metrics = Metrics()
    one = Exporter(metrics.render, lambda: (True, ""), lambda: (True, ""), landing)
    address = one.start("127.0.0.1:0")
    try:
        with socket.create_connection(address, timeout=20) as oldest:
            oldest.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert is_asked.wait(20)
            with socket.create_connection(address, timeout=20) as idle:
                assert ask(address, "GET", "/-/healthy").status == 200
                assert idle.recv(100) == b"", "the idle one made room"
            may_answer.set()
            assert b"answered after all" in b"".join(iter(lambda: oldest.recv(2**16), b""))
    finally:
        may_answer.set()
        one.stop()


def test_every_thread_has_a_name_and_ends_when_the_endpoint_stops(monkeypatch) -> None:
    monkeypatch.setattr(exporter._Handler, "timeout", 600)
    monkeypatch.setattr(exporter, "_DEADLINE_SECONDS", 600)

    def own() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in before]

    before = set(threading.enumerate())
    metrics = Metrics()
    one = Exporter(metrics.render, lambda: (True, ""), lambda: (True, ""), lambda: "")
    address = one.start("127.0.0.1:0")
    clients = [socket.create_connection(address, timeout=20) for _ in range(3)]
    eventually(lambda: sorted(own()) == ["exporter", *["exporter-client"] * 3], "a thread each")
    one.stop()
    eventually(lambda: not own(), "idle clients do not keep threads of a stopped endpoint")
    for client in clients:
        client.close()


def test_binding_asks_no_name_service(start, monkeypatch) -> None:
    def answer(*_: str) -> str:
        raise AssertionError("a resolver that does not answer would hold the service up")

    monkeypatch.setattr(socket, "getfqdn", answer)
    assert ask(start(), "GET", "/-/healthy").status == 200


def test_clients_that_go_away_or_send_nonsense_leave_no_line_in_the_log(start, caplog) -> None:
    address, chance = start(), random.Random(7)
    for number in range(60):
        with socket.create_connection(address, timeout=20) as client:
            head = b"" if number % 2 else chance.choice([b"GET / HTTP/1.1\r\n", b"GET /metrics HTTP/9.9\r\n", b"G\r\n"])
            client.sendall(head + chance.randbytes(200) + b"\r\n\r\n")
            if number % 3:  # a reset instead of a goodbye
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert ask(address, "GET", "/metrics").status == 200
    eventually(lambda: "exporter-client" not in {t.name for t in threading.enumerate()}, "all are answered")
    assert caplog.records == []


def test_a_fault_of_ours_is_logged_and_ends_only_that_request(caplog) -> None:
    def landing() -> str:
        raise KeyError("a fault of ours")

    metrics = Metrics()
    one = Exporter(metrics.render, lambda: (True, ""), lambda: (True, ""), landing)
    address = one.start("127.0.0.1:0")
    try:
        with pytest.raises(http.client.RemoteDisconnected):
            ask(address, "GET", "/")
        assert ask(address, "GET", "/metrics").status == 200
        eventually(lambda: caplog.records, "a line in the log")
        assert [(r.levelno, r.exc_info[0]) for r in caplog.records] == [(logging.ERROR, KeyError)]
    finally:
        one.stop()


def test_a_client_that_does_not_read_is_let_go(monkeypatch) -> None:
    monkeypatch.setattr(exporter._Handler, "timeout", 600)
    monkeypatch.setattr(exporter, "_DEADLINE_SECONDS", 0.3)
    large = b"x" * 2**26  # more than any socket's buffer
    one = Exporter(lambda *_: (large, "text/plain", None), lambda: (True, ""), lambda: (True, ""), lambda: "")
    address = one.start("127.0.0.1:0")
    try:
        with socket.create_connection(address, timeout=20) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert client.recv(1) == b"H", "the answer has begun"
            eventually(lambda: "exporter-client" not in {t.name for t in threading.enumerate()}, "let go")
    finally:
        one.stop()
