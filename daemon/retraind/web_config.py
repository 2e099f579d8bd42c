"""The web configuration as frozen, typed values: what a client of the endpoint must show, and what it is told. No I/O.

The format is the one that Prometheus's exporters share. What is not here of it is named as not supported, so that a
file that asks for a protection never gets less than it asks for. Reading it is web_config_file's work.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from retraind.config import Section

ClientAuth = Literal[
    "NoClientCert",
    "RequestClientCert",
    "RequireClientCert",
    "RequireAnyClientCert",
    "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
]
TlsVersion = Literal["TLS12", "TLS13"]
# A cost of 14 takes a second or two; each step doubles it, and a scrape that logs in waits for it.
BcryptHash = Annotated[
    str,
    Meta(
        pattern=r"^\$2[aby]\$(0[4-9]|1[0-4])\$[./A-Za-z0-9]{53}$",
        description="a bcrypt hash, $2a$, $2b$ or $2y$, with a cost from 04 to 14",
        extra={"is_secret": True},
    ),
]
# It is written into a response as it stands.
HeaderValue = Annotated[str, Meta(pattern=r"^[ -~]+$", description="printable ASCII")]
_LEAVE_TO_OPENSSL = "OpenSSL's own choice is used; take the key out"


_HEADER_NAMES = {
    "strict_transport_security": "Strict-Transport-Security",
    "x_content_type_options": "X-Content-Type-Options",
    "x_frame_options": "X-Frame-Options",
    "x_xss_protection": "X-XSS-Protection",
    "content_security_policy": "Content-Security-Policy",
}


class TlsServerConfig(Section, frozen=True, kw_only=True):
    """With this section clients must speak TLS."""

    unsupported: ClassVar[dict[str, str]] = {
        "cert": "name a file with cert_file",
        "key": "name a file with key_file",
        "client_ca": "name a file with client_ca_file",
        "cipher_suites": _LEAVE_TO_OPENSSL,
        "curve_preferences": _LEAVE_TO_OPENSSL,
        "prefer_server_cipher_suites": _LEAVE_TO_OPENSSL,
    }

    cert_file: Path | None = None
    key_file: Path | None = None
    client_auth_type: ClientAuth = "NoClientCert"
    client_ca_file: Path | None = None
    client_allowed_sans: tuple[str, ...] | None = None
    min_version: TlsVersion = "TLS12"
    max_version: TlsVersion = "TLS13"


class HttpHeaders(Section, frozen=True, kw_only=True, rename=_HEADER_NAMES):
    """Headers that every response gets; no other can be set."""

    strict_transport_security: HeaderValue | None = None
    x_content_type_options: Literal["nosniff"] | None = None
    x_frame_options: Literal["deny", "sameorigin"] | None = None
    x_xss_protection: HeaderValue | None = None
    content_security_policy: HeaderValue | None = None

    def given(self) -> dict[str, str]:
        """Those that are set, by the names under which they are sent."""
        values = ((header, getattr(self, name)) for name, header in _HEADER_NAMES.items())
        return {header: str(value) for header, value in values if value is not None}


class HttpServerConfig(Section, frozen=True, kw_only=True):
    """What belongs to every response."""

    unsupported: ClassVar[dict[str, str]] = {"http2": "the endpoint speaks HTTP/1.0; take the key out"}

    headers: HttpHeaders = HttpHeaders()


class WebConfig(Section, frozen=True, kw_only=True):
    """All of it. Paths are absolute once web_config_file has read them."""

    unsupported: ClassVar[dict[str, str]] = {
        "rate_limit": "connections and logins are bounded already; take the key out"
    }

    tls_server_config: TlsServerConfig | None = None
    http_server_config: HttpServerConfig = HttpServerConfig()
    basic_auth_users: dict[str, BcryptHash] = msgspec.field(default_factory=dict)

    def files(self) -> tuple[Path, ...]:
        """The files that it names."""
        tls = self.tls_server_config
        named = (tls.cert_file, tls.key_file, tls.client_ca_file) if tls is not None else ()
        return tuple(path for path in named if path is not None)

    def protections(self) -> frozenset[str]:
        """The keys that keep somebody out. A file that is half written must not take one of them away."""
        tls = self.tls_server_config
        found = {"basic_auth_users"} if self.basic_auth_users else set()
        if tls is not None:
            found.add("tls_server_config")
            if tls.client_auth_type == "RequireAndVerifyClientCert":
                found.add("tls_server_config.client_auth_type")
            if tls.min_version == "TLS13":
                found.add("tls_server_config.min_version")
            if tls.client_allowed_sans:
                found.add("tls_server_config.client_allowed_sans")
        return frozenset(found)
