"""The endpoint against real clients: slow, idle, hostile, and Prometheus."""

import gzip
import http.client
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import eventually

from retraind.supervisor import exporter
from retraind.supervisor.exporter import Exporter
from retraind.supervisor.metrics import Metrics

GOLDEN = Path(__file__).parent.parent / "golden" / "metrics.txt"


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


def test_a_client_that_drips_is_cut_off_at_the_deadline(start, monkeypatch) -> None:
    monkeypatch.setattr(exporter, "_DEADLINE_SECONDS", 0.3)
    address = start()
    with socket.create_connection(address, timeout=20) as client:

        def is_cut_off() -> bool:
            try:
                client.sendall(b"G")
            except OSError:
                return True
            ask(address, "GET", "/-/healthy")
            return False

        eventually(is_cut_off, "the drip ends")


def test_the_names_types_labels_and_help_of_every_metric_are_frozen() -> None:
    lines = []
    for line in Metrics().render("", "")[0].decode().splitlines():
        if line.startswith(("# HELP process_", "# TYPE process_", "process_")):
            continue
        # The value, and what the build's labels say, are not the interface.
        sample = re.sub(r'(version|python)="[^"]*"', r"\1", line).partition(" ")[0]
        lines.append(line if line.startswith("#") else sample)
    found = "\n".join(line for line in lines if "_bucket{" not in line) + "\n"
    assert found == GOLDEN.read_text()


def test_promtool_finds_nothing_to_complain_about() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    text = Metrics().render("", "")[0]
    result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, b"")
