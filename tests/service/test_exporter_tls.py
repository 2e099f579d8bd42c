"""The endpoint with a web configuration: TLS, client certificates and passwords, against real clients."""

import base64
import contextlib
import http.client
import json
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import bcrypt
import pytest
import yaml
from certificates import Certificates
from harness import DEADLINE_SECONDS, Service, eventually

from retraind import config_file
from retraind.errors import ConfigError
from retraind.supervisor import exporter, web_guard, web_passwords
from retraind.supervisor.exporter import Exporter
from retraind.supervisor.metrics import Metrics
from retraind.supervisor.web_guard import Guard
from retraind.web_config import WebConfig

HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
TLS = {"cert_file": "web.crt", "key_file": "web.key"}
STRICT = {"client_allowed_sans": ["prometheus.example"], "min_version": "TLS13"}
MUTUAL = TLS | {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.crt"}
REFUSED = (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)


class Endpoint:
    """An exporter behind a guard, its web configuration in a directory of certificates."""

    def __init__(self, certificates: Certificates) -> None:
        self.certificates, self.root = certificates, certificates.root
        self.path = self.root / "web.yaml"
        self.metrics = Metrics()
        self.exporter: Exporter | None = None

    def write(self, tls: dict[str, object] | None = None, users: dict[str, str] | None = None, **rest: object) -> None:
        """As a careful operator does: renamed into place."""
        sections = {"tls_server_config": tls, "basic_auth_users": users, **rest}
        draft = self.path.with_suffix(".new")
        draft.write_text(yaml.safe_dump({name: value for name, value in sections.items() if value is not None}))
        draft.rename(self.path)

    def start(self, tls: dict[str, object] | None = None, users: dict[str, str] | None = None, **rest: object) -> None:
        self.write(tls, users, **rest)
        self.serve()

    def serve(self) -> None:
        self.guard = Guard(self.path, lambda success: self.metrics.web_config_loaded(success=success))
        self.exporter = Exporter(
            self.metrics.render, lambda: (True, "turns"), lambda: (True, "ready"), lambda: "idle", self.guard
        )
        self.address = self.exporter.start("127.0.0.1:0")

    def ask(
        self, path: str = "/metrics", *, login: str | None = None, client: str | None = None, method: str = "GET",
        context: ssl.SSLContext | None = None, **headers: str,
    ) -> http.client.HTTPResponse:  # fmt: skip
        """One request over TLS, or over plain HTTP where there is no TLS."""
        has_tls = self.guard.access().context is not None
        context = context or (self.certificates.trusting(client) if has_tls else None)
        options = {"context": context} if context else {}
        kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
        with contextlib.closing(kind(*self.address, timeout=20, **options)) as connection:
            if login is not None:
                headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            response.body = response.read()
        return response

    def served(self, client: str | None = None) -> str:
        """The certificate that a new connection gets."""
        with self.connect(client) as stream:
            return stream.getpeercert(binary_form=True).hex()

    def connect(self, client: str | None = None, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
        context = context or self.certificates.trusting(client)
        with socket.create_connection(self.address, timeout=20) as raw:
            return context.wrap_socket(raw, server_hostname="localhost")

    def loaded(self) -> float | None:
        return self.metrics.registry.get_sample_value("retraind_web_config_last_load_successful")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Made once: a key pair costs a process."""
    certificates = Certificates(tmp_path_factory.mktemp("certificates"))
    certificates.server()
    certificates.server("renewed")
    certificates.client(
        "scraper", "DNS:prometheus.example", "IP:2001:db8::1", "URI:spiffe://a/b", "email:a@example.org"
    )
    certificates.client("stranger", "DNS:stranger.example")
    certificates.make("other-ca", "basicConstraints=critical,CA:TRUE", by=None)
    certificates.client("foreign", "DNS:prometheus.example", by="other-ca")
    return certificates


@pytest.fixture
def endpoint(made: Certificates, tmp_path: Path) -> Iterator[Endpoint]:
    root = tmp_path / "web"
    shutil.copytree(made.root, root)
    certificates = Certificates.__new__(Certificates)
    certificates.root = root
    one = Endpoint(certificates)
    yield one
    if one.exporter is not None:
        one.exporter.stop()


def test_over_tls_everything_works_as_without(endpoint: Endpoint) -> None:
    endpoint.start(TLS)
    answer = endpoint.ask(Accept_Encoding="gzip", **{"Accept-Encoding": "gzip"})
    assert (answer.status, answer.headers["Content-Encoding"]) == (200, "gzip")
    assert endpoint.ask("/-/healthy").body == b"turns\n"
    assert endpoint.ask("/nonsense").status == 404
    assert b"/metrics" in endpoint.ask("/").body
    assert endpoint.ask(method="HEAD").body == b""
    refused = endpoint.ask(method="POST")
    assert (refused.status, refused.headers["Allow"]) == (405, "GET, HEAD")


def test_plain_http_to_the_tls_port_is_closed_unanswered_and_unlogged(endpoint: Endpoint, caplog) -> None:
    endpoint.start(TLS)
    with socket.create_connection(endpoint.address, timeout=20) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while data := client.recv(2**16):
                assert b"HTTP" not in data
                assert b"retraind" not in data
    assert endpoint.ask().status == 200
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


@pytest.mark.parametrize(
    ("settings", "newest", "is_served"),
    [
        ({}, ssl.TLSVersion.TLSv1_2, True),
        ({}, ssl.TLSVersion.TLSv1_1, False),
        ({"min_version": "TLS13"}, ssl.TLSVersion.TLSv1_2, False),
        ({"min_version": "TLS13"}, ssl.TLSVersion.TLSv1_3, True),
    ],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_old_versions_of_tls_are_refused(endpoint: Endpoint, settings, newest: ssl.TLSVersion, is_served: bool) -> None:
    endpoint.start(TLS | settings)
    context = endpoint.certificates.trusting()
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version, context.maximum_version = min(ssl.TLSVersion.TLSv1_1, newest), newest
    if is_served:
        assert endpoint.ask(context=context).status == 200
        return
    with pytest.raises(REFUSED):
        endpoint.ask(context=context)


def test_the_newest_version_can_be_bounded(endpoint: Endpoint) -> None:
    endpoint.start(TLS | {"max_version": "TLS12"})
    with endpoint.connect() as stream:
        assert stream.version() == "TLSv1.2"


@pytest.mark.parametrize(
    ("client", "is_served"), [("scraper", True), ("stranger", True), ("foreign", False), (None, False)]
)
def test_a_client_certificate_must_be_signed_by_the_ca(endpoint: Endpoint, client: str | None, is_served: bool) -> None:
    endpoint.start(MUTUAL)
    if is_served:
        assert endpoint.ask(client=client).status == 200
        return
    with pytest.raises(REFUSED):
        endpoint.ask(client=client)


def test_a_certificate_that_may_be_left_out_is_verified_when_it_is_given(endpoint: Endpoint) -> None:
    endpoint.start(MUTUAL | {"client_auth_type": "VerifyClientCertIfGiven"})
    assert endpoint.ask().status == 200
    assert endpoint.ask(client="scraper").status == 200
    with pytest.raises(REFUSED):
        endpoint.ask(client="foreign")


@pytest.mark.parametrize(
    "name",
    ["prometheus.example", "2001:0DB8:0:0::1", "spiffe://a/b", "a@example.org"],
    ids=["DNS", "IP", "URI", "email"],
)
def test_only_a_certificate_with_an_allowed_name_gets_in(endpoint: Endpoint, name: str) -> None:
    endpoint.start(MUTUAL | {"client_allowed_sans": ["nobody.example", name]})
    assert endpoint.ask(client="scraper").status == 200
    with pytest.raises(REFUSED):
        endpoint.ask(client="stranger")


def test_the_ca_may_be_one_clients_own_certificate(endpoint: Endpoint) -> None:
    endpoint.start(MUTUAL | {"client_ca_file": "scraper.crt"})
    assert endpoint.ask(client="scraper").status == 200
    with pytest.raises(REFUSED):
        endpoint.ask(client="stranger")


def test_a_certificate_that_is_replaced_is_served_to_the_next_connection(endpoint: Endpoint) -> None:
    endpoint.start(TLS)
    first = endpoint.certificates.serial("web")
    assert endpoint.served() == first
    for kind in ("key", "crt"):
        (endpoint.root / f"renewed.{kind}").rename(endpoint.root / f"web.{kind}")
    renewed = endpoint.certificates.serial("web")
    assert renewed != first
    assert endpoint.served() == renewed
    assert endpoint.loaded() == 1


def test_between_two_renames_the_old_pair_serves_and_it_heals(endpoint: Endpoint, caplog) -> None:
    caplog.set_level(logging.INFO)
    endpoint.start(TLS)
    first, renewed = endpoint.certificates.serial("web"), endpoint.certificates.serial("renewed")
    (endpoint.root / "renewed.crt").rename(endpoint.root / "web.crt")
    assert [endpoint.served() for _ in range(3)] == [first] * 3
    assert endpoint.loaded() == 0
    (endpoint.root / "renewed.key").rename(endpoint.root / "web.key")
    assert endpoint.served() == renewed
    assert endpoint.loaded() == 1
    told = [record.getMessage().replace(f"{endpoint.root}/", "") for record in caplog.records]
    assert told == [
        (
            "metrics.web_config: can not be used, what is in force stays: web.yaml:3: tls_server_config.key_file:"
            " web.key is not the key of the certificate in web.crt"
        ),
        "metrics.web_config: web.yaml is in force as it is on disk",
    ]


def _gone(endpoint: Endpoint) -> None:
    endpoint.path.unlink()


def _half_written(endpoint: Endpoint) -> None:
    endpoint.path.write_text(endpoint.path.read_text()[:30])


def _emptied(endpoint: Endpoint) -> None:
    endpoint.path.write_text("")


def _without_passwords(endpoint: Endpoint) -> None:
    endpoint.write(MUTUAL | STRICT)


def _without_tls(endpoint: Endpoint) -> None:
    endpoint.write(None, {"prometheus": HASH})


def _without_client_certificates(endpoint: Endpoint) -> None:
    endpoint.write(TLS | {"min_version": "TLS13"}, {"prometheus": HASH})


def _without_names(endpoint: Endpoint) -> None:
    endpoint.write(MUTUAL | {"min_version": "TLS13"}, {"prometheus": HASH})


def _with_an_older_tls(endpoint: Endpoint) -> None:
    endpoint.write(MUTUAL | STRICT | {"min_version": "TLS12"}, {"prometheus": HASH})


def _without_a_key(endpoint: Endpoint) -> None:
    (endpoint.root / "web.key").unlink()


def _without_a_ca(endpoint: Endpoint) -> None:
    (endpoint.root / "ca.crt").rename(endpoint.root / "ca.away")


@pytest.mark.parametrize(
    "spoil",
    [
        _gone, _half_written, _emptied, _without_passwords, _without_tls, _without_client_certificates, _without_names,
        _with_an_older_tls, _without_a_key, _without_a_ca,
    ],
)  # fmt: skip
def test_nothing_on_disk_opens_up_a_running_endpoint(endpoint: Endpoint, spoil: Callable[[Endpoint], None]) -> None:
    endpoint.start(MUTUAL | STRICT, {"prometheus": HASH})
    trusting = endpoint.certificates.trusting
    scraper, stranger = trusting("scraper"), trusting("stranger")
    spoil(endpoint)
    assert endpoint.ask(context=scraper, login="prometheus:secret").status == 200
    assert endpoint.ask(context=scraper).status == 401
    with pytest.raises(REFUSED):
        endpoint.ask(context=stranger, login="prometheus:secret")
    with endpoint.connect(context=scraper) as stream:
        assert stream.version() == "TLSv1.3"
    scraper.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(REFUSED):
        endpoint.ask(context=scraper, login="prometheus:secret")
    assert endpoint.loaded() == 0


def test_a_protection_that_is_added_holds_from_the_next_connection_on(endpoint: Endpoint) -> None:
    endpoint.start(TLS)
    assert endpoint.ask().status == 200
    endpoint.write(MUTUAL, {"prometheus": HASH})
    assert endpoint.ask(client="scraper").status == 401
    with pytest.raises(REFUSED):
        endpoint.ask()


def test_an_unchanged_set_is_not_read_again(endpoint: Endpoint, monkeypatch) -> None:
    monkeypatch.setattr(web_guard, "_SETTLED_NS", 0)
    endpoint.start(MUTUAL, {"prometheus": HASH})

    def read(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(Guard, "_read", read)
    for _ in range(3):
        assert endpoint.guard.access().context is not None


def test_a_disk_that_hangs_holds_up_one_client_and_not_all(endpoint: Endpoint, monkeypatch) -> None:
    endpoint.start(TLS)
    monkeypatch.setattr(web_guard, "_LOOK_SECONDS", 0.05)
    with endpoint.guard._lock:  # as the thread that waits for the disk has it
        assert endpoint.served() == endpoint.certificates.serial("web")


def test_a_file_that_can_be_read_again_heals_though_its_content_is_the_same(endpoint: Endpoint, monkeypatch) -> None:
    monkeypatch.setattr(web_guard, "_SETTLED_NS", 0)
    endpoint.start(TLS)
    key = endpoint.root / "web.key"
    key.rename(endpoint.root / "away")
    assert (endpoint.served() and endpoint.loaded()) == 0
    (endpoint.root / "away").rename(key)
    assert (endpoint.served() and endpoint.loaded()) == 1


def test_a_file_that_was_just_written_is_read_again_though_its_times_are_the_same(endpoint: Endpoint) -> None:
    endpoint.write(None, {"prometheus": HASH})
    guard = Guard(endpoint.path, lambda _: None)
    assert not guard._is_settled
    eventually(lambda: guard.access() and guard._is_settled, "it is quiet")


def test_a_wrong_or_missing_password_is_401_on_every_path_and_a_right_one_gets_in(endpoint: Endpoint) -> None:
    endpoint.start(None, {"prometheus": HASH, "j\u00f6rg": HASH})
    for path in ("/metrics", "/", "/-/healthy", "/-/ready", "/nonsense"):
        for login in (None, "prometheus:wrong", "nobody:secret", "prometheus", "prometheus:", ":secret", ""):
            answer = endpoint.ask(path, login=login)
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, 'Basic realm="retraind"')
            assert b"retraind_" not in answer.body
    for login in ("prometheus:secret", "j\u00f6rg:secret"):
        assert endpoint.ask(login=login).status == 200
        assert endpoint.ask("/-/healthy", login=login).body == b"turns\n"
    assert endpoint.ask(method="POST").status == 401
    assert endpoint.ask(method="POST", login="prometheus:secret").status == 405
    assert endpoint.ask(method="HEAD").body == b""


@pytest.mark.parametrize(
    "header",
    ["", "Basic", "Basic !!!", "Basic c2VjcmV0", "Bearer cHJvbWV0aGV1czpzZWNyZXQ=", "Basic \u00e9", "Basic AAAA" * 500],
)
def test_a_header_that_makes_no_sense_is_401(endpoint: Endpoint, header: str, caplog) -> None:
    endpoint.start(None, {"prometheus": HASH})
    assert endpoint.ask(Authorization=header.encode("latin-1")).status == 401
    assert caplog.records == []


def test_a_password_is_looked_at_as_far_as_bcrypt_does_and_a_nul_is_no_fault(endpoint: Endpoint) -> None:
    long = "x" * 72
    endpoint.start(None, {"a": bcrypt.hashpw(long.encode(), bcrypt.gensalt(4)).decode()})
    assert endpoint.ask(login=f"a:{long}and more").status == 200
    assert endpoint.ask(login=f"a:{long[:-1]}").status == 401
    assert endpoint.ask(login="a:\0").status == 401


def test_a_login_is_computed_once_until_its_hash_changes(endpoint: Endpoint) -> None:
    endpoint.start(None, {"prometheus": HASH})
    logins = endpoint.guard._logins
    for login, status in (("prometheus:secret", 200), ("prometheus:wrong", 401), ("nobody:secret", 401)):
        before = logins.num_computed
        assert {endpoint.ask(login=login).status for _ in range(3)} == {status}
        assert logins.num_computed == before + 1, "an unknown name costs what a known one does"
    endpoint.write(None, {"prometheus": bcrypt.hashpw(b"new", bcrypt.gensalt(4)).decode(), "nobody": HASH})
    assert endpoint.ask(login="prometheus:secret").status == 401
    assert endpoint.ask(login="prometheus:new").status == 200
    assert endpoint.ask(login="nobody:secret").status == 200


def test_guesses_are_remembered_within_bounds_and_push_no_good_login_out() -> None:
    logins = web_passwords.Logins()
    assert logins.compute(lambda: True, b"good")
    for number in range(web_passwords._MAX_REMEMBERED * 2):
        assert not logins.compute(lambda: False, str(number).encode())
    assert {verdict: len(keys) for verdict, keys in logins._remembered.items()} == {
        True: 1,
        False: web_passwords._MAX_REMEMBERED,
    }
    assert (logins.recall(b"good"), logins.recall(b"0")) == (True, None)


def test_one_hash_is_computed_at_a_time_and_few_wait_for_it(endpoint: Endpoint) -> None:
    endpoint.start(None, {"prometheus": HASH})
    assert endpoint.ask(login="prometheus:secret").status == 200
    eventually(lambda: endpoint.guard.access() and endpoint.guard._is_settled, "it is quiet")
    at_work, may_go, most = [], threading.Event(), []

    def check(*_: bytes) -> bool:
        at_work.append(1)
        most.append(len(at_work))
        assert may_go.wait(20)
        at_work.pop()
        return False

    endpoint.guard.access().passwords._check = check
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda number=number: statuses.append(endpoint.ask(login=f"a:{number}").status))
        for number in range(web_passwords._MAX_WAITING + 10)
    ]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: statuses == [503] * 10, "the rest is told to come back")
        assert endpoint.ask(login="prometheus:secret").status == 200, "who is known waits for nobody"
    finally:
        may_go.set()
        for thread in threads:
            thread.join(20)
    assert sorted(statuses) == [401] * web_passwords._MAX_WAITING + [503] * 10
    assert max(most) == 1


def test_headers_are_on_every_response(endpoint: Endpoint) -> None:
    headers = {"X-Frame-Options": "deny", "Content-Security-Policy": "default-src 'none'"}
    endpoint.start(None, {"prometheus": HASH}, http_server_config={"headers": headers})
    for login, path, status in (("prometheus:secret", "/", 200), (None, "/", 401), ("prometheus:secret", "/x", 404)):
        answer = endpoint.ask(path, login=login)
        assert answer.status == status
        assert {name: answer.headers[name] for name in headers} == headers


def test_two_hundred_clients_that_never_finish_the_handshake_do_not_keep_a_scrape_out(endpoint: Endpoint) -> None:
    endpoint.start(TLS)
    before = threading.active_count()
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    clients = []
    for number in range(200):
        clients.append(socket.create_connection(endpoint.address, timeout=20))
        if number % 2:
            clients[-1].sendall(hello)
    for _ in range(5):
        assert endpoint.ask().status == 200
    eventually(lambda: threading.active_count() - before <= exporter._MAX_CONNECTIONS + 1, "threads are bounded")
    for client in clients:
        client.close()
    eventually(lambda: threading.active_count() <= before, "every thread ends with its client")


def test_a_handshake_that_drips_ends_at_the_deadline_and_a_silent_one_at_the_time_out(endpoint, monkeypatch) -> None:
    endpoint.start(TLS)
    monkeypatch.setattr(exporter, "_DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(exporter._Handler, "timeout", 600)
    with socket.create_connection(endpoint.address, timeout=20) as client:
        client.sendall(b"\x16\x03\x01\x02\x00")

        def is_cut_off() -> bool:
            try:
                client.sendall(b"\x01")
            except OSError:
                return True
            return False

        eventually(is_cut_off, "the drip ends")
    monkeypatch.setattr(exporter, "_DEADLINE_SECONDS", 600)
    monkeypatch.setattr(exporter._Handler, "timeout", 0.2)
    with socket.create_connection(endpoint.address, timeout=20) as client:
        assert client.recv(100) == b"", "the server closes"


def test_a_client_that_stays_after_its_answer_is_not_waited_for(endpoint: Endpoint) -> None:
    endpoint.start(TLS)
    with endpoint.connect() as stream:
        stream.sendall(b"GET /-/healthy HTTP/1.1\r\n\r\n")
        answer = b"".join(iter(lambda: stream.recv(2**16), b""))
        assert answer.endswith(b"turns\n")
        eventually(lambda: "exporter-client" not in {t.name for t in threading.enumerate()}, "let go")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda root: (root / "web.crt").unlink(),
         "2: tls_server_config.cert_file: web.crt: No such file or directory; the service's user must be able to read"),
        (lambda root: (root / "web.key").rename(root / "x") and (root / "web.key").mkdir(),
         "3: tls_server_config.key_file: web.key is not a regular file"),
        (lambda root: (root / "web.crt").write_text("x"),
         "2: tls_server_config.cert_file: web.crt holds no certificate in PEM form (NO_CERTIFICATE_OR_CRL_FOUND)"),
        (lambda root: shutil.copy(root / "ca.key", root / "web.key"),
         "3: tls_server_config.key_file: web.key is not the key of the certificate in web.crt"),
        (lambda root: (root / "web.key").write_text("x"),
         "3: tls_server_config.key_file: web.key holds no private key in PEM form that OpenSSL can use with web.crt"),
        (lambda root: subprocess.run(
            ["openssl", "pkey", "-aes256", "-passout", "pass:x", "-in", root / "ca.key", "-out", root / "web.key"],
            check=True),
         "3: tls_server_config.key_file: web.key is encrypted: write it without a passphrase (see `openssl pkey`)"),
        (lambda root: (root / "ca.crt").write_text(""),
         "4: tls_server_config.client_ca_file: ca.crt holds no certificate in PEM form (NO_CERTIFICATE_OR_CRL_FOUND)"),
    ],
)  # fmt: skip
def test_what_the_file_names_is_tried_at_the_start(endpoint: Endpoint, change, complaint: str) -> None:
    lines = [
        "cert_file: web.crt",
        "key_file: web.key",
        "client_ca_file: ca.crt",
        f"client_auth_type: {MUTUAL['client_auth_type']}",
    ]
    endpoint.path.write_text("tls_server_config:\n" + "".join(f"  {line}\n" for line in lines))
    change(endpoint.root)
    with pytest.raises(ConfigError) as caught:
        Guard(endpoint.path, lambda _: None)
    told = caught.value.message.replace(f"{endpoint.root}/", "")
    assert told.startswith(f"web.yaml:{complaint}")
    assert "\n" not in told


def test_a_hash_that_bcrypt_can_not_use_is_told_at_the_start(endpoint: Endpoint) -> None:
    endpoint.write(None, {"a": HASH[:28] + "9" + HASH[29:]})
    with pytest.raises(ConfigError, match=r"web\.yaml:2: basic_auth_users\.a: is no hash that bcrypt can use"):
        Guard(endpoint.path, lambda _: None)


def test_without_bcrypt_the_way_to_get_it_is_told(endpoint: Endpoint, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    endpoint.write(None, {"a": HASH})
    with pytest.raises(
        ConfigError, match=r"web\.yaml:1: basic_auth_users: needs the Python module bcrypt.*python3-bcrypt"
    ):
        Guard(endpoint.path, lambda _: None)
    endpoint.write(TLS)
    assert Guard(endpoint.path, lambda _: None).access().context is not None, "nothing else needs it"


def test_all_problems_of_the_file_and_of_what_it_names_are_told_at_once(endpoint: Endpoint) -> None:
    endpoint.path.write_text("tls_server_config:\n  key_file: nowhere\n  cert_file: ca.key\nrate_limit: 1\n")
    with pytest.raises(ConfigError) as caught:
        Guard(endpoint.path, lambda _: None)
    assert [line.split(": ")[1] for line in caught.value.message.split("\n")] == [
        "tls_server_config.key_file", "tls_server_config.cert_file", "rate_limit",
    ]  # fmt: skip


OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "OPERATIONS.md"


def test_the_commands_and_the_file_of_the_operators_page_make_an_endpoint(endpoint: Endpoint) -> None:
    section = OPERATIONS.read_text().partition("\n## Securing the endpoint\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    settings, commands = next(text for kind, text in blocks if kind == "yaml"), dict(blocks)["sh"]
    for away in ("web.crt", "web.key"):
        (endpoint.root / away).unlink()
    here = {"/etc/retraind": endpoint.root, "root:retraind": f"{os.getuid()}:{os.getgid()}", "python3": sys.executable}
    for there, path in here.items():
        assert there in commands
        commands = commands.replace(there, str(path))
    done = subprocess.run(
        ["sh", "-euc", commands], input="correct horse\n", capture_output=True, text=True, timeout=60, check=True,
        start_new_session=True,  # without a terminal the password is read from the input
    )  # fmt: skip
    endpoint.path.write_text(settings.replace("$2b$10$...", done.stdout.strip().splitlines()[-1].split()[-1]))
    endpoint.serve()
    context = ssl.create_default_context(cafile=str(endpoint.root / "web.crt"))
    context.check_hostname = False  # it is for node1.example
    assert endpoint.ask(context=context, login="prometheus:correct horse").status == 200
    assert endpoint.ask(context=context).status == 401


def test_the_operators_page_names_every_key_of_the_web_configuration() -> None:
    section = OPERATIONS.read_text().partition("\n## Securing the endpoint\n")[2].partition("\n## ")[0]
    table = "\n".join(line for line in section.splitlines() if line.startswith("| "))
    for key in config_file.all_keys(WebConfig):
        assert f"{key.rpartition('.')[2]}`" in table, key


def scrape(service: Service, certificates: Certificates, client: str | None, login: str | None) -> int:
    request = urllib.request.Request(f"{service.url}/metrics")
    if login is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=20, context=certificates.trusting(client)) as response:
            assert b"retraind_ready 1" in response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_the_real_service_serves_tls_passwords_and_client_certificates_and_renews(make_service, endpoint) -> None:
    endpoint.write(MUTUAL | {"client_allowed_sans": ["prometheus.example"]}, {"prometheus": HASH})
    service = make_service(metrics={"web_config": "web/web.yaml"}).start()
    assert service.url.startswith("https://")
    assert "(TLS, client certificates required, 1 user)" in service.log()
    certificates = endpoint.certificates
    assert scrape(service, certificates, "scraper", "prometheus:secret") == 200
    assert scrape(service, certificates, "scraper", "prometheus:wrong") == 401
    for client in ("stranger", "foreign", None):
        with pytest.raises((urllib.error.URLError, *REFUSED)):
            scrape(service, certificates, client, "prometheus:secret")
    for kind in ("key", "crt"):
        (endpoint.root / f"renewed.{kind}").rename(endpoint.root / f"web.{kind}")
    endpoint.address = ("127.0.0.1", int(service.url.rpartition(":")[2]))
    assert endpoint.served("scraper") == certificates.serial("web")
    service.drop("good.csv")
    service.wait_for_state("good.csv", "published")
    assert service.stop() == 0
    assert "Traceback" not in service.log()


@pytest.mark.parametrize("content", ["", "tls_server_config:\n  cert_file: nowhere\nrate_limit: {}\n", None])
def test_a_broken_web_configuration_ends_the_service_at_the_start_with_78(make_service, content: str | None) -> None:
    service = make_service(metrics={"web_config": "web.yaml"})
    if content is not None:
        (service.root / "web.yaml").write_text(content)
    service.start(wait=False)
    assert service.wait() == 78
    assert f"{service.root}/web.yaml" in service.log()
    assert "metrics at" not in service.log()
    assert "Traceback" not in service.log()


def test_check_tells_what_the_web_configuration_asks_for_and_what_is_wrong_with_it(make_service, endpoint) -> None:
    service = make_service(metrics={"web_config": str(endpoint.path)})

    def row() -> dict[str, str]:
        checks = json.loads(service.command("check", "--json").stdout)["checks"]
        return next(check for check in checks if check["name"] == "metrics.web_config")

    endpoint.write(TLS, {"a": HASH, "b": HASH})
    assert row() == {"name": "metrics.web_config", "status": "pass", "message": f"{endpoint.path}: TLS, 2 users"}
    (endpoint.root / "web.key").unlink()
    assert (row()["status"], "web.key: No such file" in row()["message"]) == ("fail", True)
    service.settings["metrics"] = {"listen": ":0"}
    service.settings["worker"]["python"] = "auto"
    service.write_config()
    assert row()["status"] == "warn"
    assert service.command("check").returncode == 0


def test_a_real_prometheus_scrapes_over_tls_with_a_password(make_service, endpoint: Endpoint, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    endpoint.write(MUTUAL, {"prometheus": HASH})
    service = make_service(metrics={"web_config": str(endpoint.path)}).start()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    job = {
        "job_name": "retraind", "scheme": "https", "basic_auth": {"username": "prometheus", "password": "secret"},
        "tls_config": {name: str(endpoint.root / file) for name, file in (
            ("ca_file", "ca.crt"), ("cert_file", "scraper.crt"), ("key_file", "scraper.key"))},
        "static_configs": [{"targets": [service.url.removeprefix("https://")]}],
    }  # fmt: skip
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}))
    with (tmp_path / "prometheus.log").open("wb") as log:
        prometheus = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
             f"--web.listen-address={own}"],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def up() -> str | None:
        try:
            with urllib.request.urlopen(f"http://{own}/api/v1/query?query=up", timeout=5) as response:
                found = json.load(response)["data"]["result"]
        except OSError:  # it has not started yet
            return None
        return found[0]["value"][1] if found else None

    try:
        assert eventually(up, "a first scrape") == "1", (tmp_path / "prometheus.log").read_text()
    finally:
        prometheus.terminate()
        prometheus.wait(DEADLINE_SECONDS)
