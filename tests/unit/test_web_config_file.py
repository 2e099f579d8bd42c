"""The web configuration file: what is taken over, and every mistake in the words that it gets."""

from pathlib import Path

import pytest

from retraind import web_config_file
from retraind.errors import ConfigError
from retraind.web_config import WebConfig

# Of the password "secret"; the cost of 4 is the lowest.
HASH = "$2b$04$yQ8cK1/wJq3sW8yAcZ0Y4.R8cYbYzw5z2m1RZr0x6o6Q1b3b5J6yS"
TLS = "tls_server_config:\n  cert_file: a.crt\n  key_file: a.key\n"
FORM = "does not have the form that is expected"
HASH_FORM = f"the value {FORM} (a bcrypt hash, $2a$, $2b$ or $2y$, with a cost from 04 to 14)"
USE = "use RequireAndVerifyClientCert with client_ca_file"
NOT_ASKED = "is not supported: a client's certificate is verified here or not asked for"
CIPHERS = "not supported: OpenSSL's own choice is used; take the key out"


def read(tmp_path: Path, content: str) -> tuple[WebConfig, list[str]]:
    path = tmp_path / "web.yaml"
    path.write_text(content)
    config, problems = web_config_file.read(path)
    return config, [message.removeprefix(f"{tmp_path}/") for _, message in sorted(problems.found)]


def test_everything_that_is_supported_is_read(tmp_path: Path) -> None:
    config, problems = read(
        tmp_path,
        f"""\
tls_server_config:
  cert_file: web.crt
  key_file: /run/keys/web.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ../ca.crt
  client_allowed_sans:
    - prometheus.example
    - 10.0.0.1
  min_version: TLS13
  max_version: TLS13
http_server_config:
  headers:
    Strict-Transport-Security: max-age=60
    X-Content-Type-Options: nosniff
    X-Frame-Options: deny
    X-XSS-Protection: "0"
    Content-Security-Policy: default-src 'none'
basic_auth_users:
  prometheus: {HASH}
  some.body: {HASH.replace("2b", "2y")}
""",
    )
    assert problems == []
    tls = config.tls_server_config
    assert config.files() == (tmp_path / "web.crt", Path("/run/keys/web.key"), tmp_path / "../ca.crt")
    assert (tls.client_auth_type, tls.min_version, tls.max_version) == ("RequireAndVerifyClientCert", "TLS13", "TLS13")
    assert tls.client_allowed_sans == ("prometheus.example", "10.0.0.1")
    assert config.http_server_config.headers.given() == {
        "Strict-Transport-Security": "max-age=60", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "deny",
        "X-XSS-Protection": "0", "Content-Security-Policy": "default-src 'none'",
    }  # fmt: skip
    assert list(config.basic_auth_users) == ["prometheus", "some.body"]
    assert config.protections() == {
        "basic_auth_users", "tls_server_config", "tls_server_config.client_auth_type",
        "tls_server_config.client_allowed_sans", "tls_server_config.min_version",
    }  # fmt: skip


def test_tls_alone_has_the_defaults_of_the_format(tmp_path: Path) -> None:
    config, problems = read(tmp_path, TLS)
    assert problems == []
    tls = config.tls_server_config
    assert (tls.client_auth_type, tls.min_version, tls.max_version) == ("NoClientCert", "TLS12", "TLS13")
    assert config.http_server_config.headers.given() == {}


def test_passwords_alone_are_allowed(tmp_path: Path) -> None:
    config, problems = read(tmp_path, f"basic_auth_users: {{a: {HASH}}}\n")
    assert (config.tls_server_config, problems) == (None, [])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", ("1: has neither tls_server_config nor basic_auth_users: for plain HTTP without a password set"
         " metrics.web_config to null")),
        ("http_server_config: {headers: {X-Frame-Options: deny}}",
         ("1: has neither tls_server_config nor basic_auth_users: for plain HTTP without a password set"
         " metrics.web_config to null")),
        ("\ntls_server_config:\n  key_file: k\n",
         "2: tls_server_config.cert_file: is missing: TLS needs both cert_file and key_file"),
        ("tls_server_config:\n  cert_file: k\n",
         "1: tls_server_config.key_file: is missing: TLS needs both cert_file and key_file"),
        (TLS + "  client_auth_type: RequestClientCert\n",
         f"4: tls_server_config.client_auth_type: RequestClientCert {NOT_ASKED}; {USE}"),
        (TLS + "  client_auth_type: RequireAnyClientCert\n",
         f"4: tls_server_config.client_auth_type: RequireAnyClientCert {NOT_ASKED}; {USE}"),
        (TLS + "  client_auth_type: RequireClientCert\n",
         f"4: tls_server_config.client_auth_type: RequireClientCert {NOT_ASKED}; {USE}"),
        (TLS + "  client_auth_type: Always\n  client_ca_file: ca\n",
         ("4: tls_server_config.client_auth_type: must be one of NoClientCert, RequestClientCert, RequireClientCert,"
         " RequireAnyClientCert, VerifyClientCertIfGiven, RequireAndVerifyClientCert, not 'Always'")),
        (TLS + "  client_ca_file: ca.crt\n", ("4: tls_server_config.client_ca_file: has no effect with client_auth_type"
         " NoClientCert: set that to RequireAndVerifyClientCert")),
        (TLS + "  client_auth_type: VerifyClientCertIfGiven\n", ("1: tls_server_config.client_ca_file: is missing:"
         " VerifyClientCertIfGiven needs the certificates that clients are verified with")),
        (TLS + "  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: c\n  client_allowed_sans: [a]\n",
         ("6: tls_server_config.client_allowed_sans: needs client_auth_type RequireAndVerifyClientCert: others let"
         " clients in without")),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: c\n  client_allowed_sans: []\n",
         "6: tls_server_config.client_allowed_sans: is empty, so nobody could connect: name one, or take the key out"),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: c\n  client_allowed_sans: a\n",
         "6: tls_server_config.client_allowed_sans: expected a list"),
        (TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: c\n  client_allowed_sans: [[a]]\n",
         "6: tls_server_config.client_allowed_sans: expected one value, not a list"),
        (TLS + "  min_version: TLS11\n", "4: tls_server_config.min_version: must be one of TLS12, TLS13, not 'TLS11'"),
        (TLS + "  min_version: TLS13\n  max_version: TLS12\n",
         "5: tls_server_config.max_version: TLS12 is below min_version TLS13"),
        (TLS + "  cert: x\n", "4: tls_server_config.cert: not supported: name a file with cert_file"),
        (TLS + "  key: x\n", "4: tls_server_config.key: not supported: name a file with key_file"),
        (TLS + "  client_ca: x\n", "4: tls_server_config.client_ca: not supported: name a file with client_ca_file"),
        (TLS + "  cipher_suites: [x]\n", f"4: tls_server_config.cipher_suites: {CIPHERS}"),
        (TLS + "  curve_preferences: [x]\n", f"4: tls_server_config.curve_preferences: {CIPHERS}"),
        (TLS + "  prefer_server_cipher_suites: true\n",
         f"4: tls_server_config.prefer_server_cipher_suites: {CIPHERS}"),
        (TLS + "http_server_config:\n  http2: false\n",
         "5: http_server_config.http2: not supported: the endpoint speaks HTTP/1.0; take the key out"),
        (TLS + "rate_limit: {burst: 1}\n",
         "4: rate_limit: not supported: connections and logins are bounded already; take the key out"),
        (TLS + "  cert_fil: x\n",
         "4: tls_server_config.cert_fil: unknown key (did you mean tls_server_config.cert_file?)"),
        (TLS + "cert_file: x\n", "4: cert_file: unknown key (did you mean tls_server_config.cert_file?)"),
        (TLS + "basic_auth_user: {}\n", "4: basic_auth_user: unknown key (did you mean basic_auth_users?)"),
        (TLS + "http_server_config:\n  headers:\n    X-Frame-Option: deny\n",
         ("6: http_server_config.headers.X-Frame-Option: unknown key"
         " (did you mean http_server_config.headers.X-Frame-Options?)")),
        (TLS + "http_server_config:\n  headers:\n    Server: x\n",
         "6: http_server_config.headers.Server: unknown key"),
        (TLS + "http_server_config:\n  headers:\n    X-Frame-Options: DENY\n",
         "6: http_server_config.headers.X-Frame-Options: must be one of deny, sameorigin, not 'DENY'"),
        (TLS + 'http_server_config:\n  headers:\n    X-XSS-Protection: "\u00e9"\n',
         f"6: http_server_config.headers.X-XSS-Protection: '\u00e9' {FORM} (printable ASCII)"),
        (TLS + 'http_server_config:\n  headers:\n    X-XSS-Protection: "a\\r\\nSet-Cookie: b"\n',
         "6: http_server_config.headers.X-XSS-Protection: must not hold control characters: 'a\\r\\nSet-Cookie: b'"),
        ("basic_auth_users:\n", "1: basic_auth_users: names nobody: add a user, or take the key out"),
        ("basic_auth_users: {}\n", "1: basic_auth_users: names nobody: add a user, or take the key out"),
        ("basic_auth_users:\n  a: hunter2\n", f"2: basic_auth_users.a: {HASH_FORM}"),
        ('basic_auth_users:\n  a: "hunter2\\n"\n',
         "2: basic_auth_users.a: must not hold control characters: the value"),
        (f"basic_auth_users:\n  a: {HASH.replace('$04$', '$15$')}\n", f"2: basic_auth_users.a: {HASH_FORM}"),
        (f"basic_auth_users:\n  a: {HASH.replace('2b', '2x')}\n", f"2: basic_auth_users.a: {HASH_FORM}"),
        ("basic_auth_users:\n  a:\n", "2: basic_auth_users.a: has no value"),
        (f"basic_auth_users:\n  a: {HASH}\n  a: {HASH}\n", "3: basic_auth_users.a: given twice, first in line 2"),
        (f'basic_auth_users:\n  "a:b": {HASH}\n',
         "2: basic_auth_users.a:b: 'a:b' is no user name: it must be text without `:`"),
        ("basic_auth_users: [a]\n", "1: basic_auth_users: expected keys with values below it"),
        ("tls_server_config: on\n", "1: tls_server_config: expected keys with values below it"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_line_and_a_way_out(tmp_path: Path, content: str, complaint: str) -> None:
    assert read(tmp_path, content)[1] == [f"web.yaml:{complaint}"]


@pytest.mark.parametrize("content", ["tls_server_config:\n", "tls_server_config: {}\n", "tls_server_config: null\n"])
def test_an_empty_tls_section_is_no_plain_http(tmp_path: Path, content: str) -> None:
    assert read(tmp_path, content)[1] == [
        f"web.yaml:1: tls_server_config.{key}: is missing: TLS needs both cert_file and key_file"
        for key in ("cert_file", "key_file")
    ]


def test_all_mistakes_are_told_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    content = "basic_auth_users:\n  a: b\ntls_server_config:\n  min_version: SSL3\n  cipher_suites: []\nrate_limt: 1\n"
    missing = "is missing: TLS needs both cert_file and key_file"
    assert read(tmp_path, content)[1] == [
        f"web.yaml:2: basic_auth_users.a: {HASH_FORM}",
        f"web.yaml:3: tls_server_config.cert_file: {missing}",
        f"web.yaml:3: tls_server_config.key_file: {missing}",
        "web.yaml:4: tls_server_config.min_version: must be one of TLS12, TLS13, not 'SSL3'",
        f"web.yaml:5: tls_server_config.cipher_suites: {CIPHERS}",
        "web.yaml:6: rate_limt: unknown key",
    ]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"web\.yaml: No such file or directory"):
        web_config_file.read(tmp_path / "web.yaml")
