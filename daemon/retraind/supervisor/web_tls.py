"""TLS of the endpoint: certificate, key and CA on disk -> a context; the names in a client's certificate.

Never serves with less than what was asked for: whatever can not be read or does not fit together is a problem at the
line of its key, and there is no context then. Knows nothing of connections. Raises nothing.
"""

import ipaddress
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retraind.config_file import Problems
from retraind.web_config import TlsServerConfig

_TLS = "tls_server_config"
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENTS = {"VerifyClientCertIfGiven": ssl.CERT_OPTIONAL, "RequireAndVerifyClientCert": ssl.CERT_REQUIRED}


class _EncryptedKeyError(Exception):
    """The key asks for a passphrase, and nobody sits before a service to type it."""


def make_context(tls: TlsServerConfig, problems: Problems) -> ssl.SSLContext | None:
    """The context for new connections; None when `problems` has grown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[tls.min_version], _VERSIONS[tls.max_version]
    # A client that renegotiates, or resumes what an older certificate or CA allowed, is refused: a handshake a scrape.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    num_before = len(problems.found)
    _load_pair(context, tls, problems)
    if tls.client_auth_type in _CLIENTS and tls.client_ca_file is not None:
        # A CA in the middle of a chain, or one client's own certificate, may be what the operator trusts.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _load_certificates(context, tls.client_ca_file, "client_ca_file", problems)
        context.verify_mode = _CLIENTS[tls.client_auth_type]
    return context if len(problems.found) == num_before else None


def _load_pair(context: ssl.SSLContext, tls: TlsServerConfig, problems: Problems) -> None:
    if tls.cert_file is None or tls.key_file is None:
        return  # told already
    alone = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # of a pair OpenSSL does not say which of the two is wrong
    has_certificate = _load_certificates(alone, tls.cert_file, "cert_file", problems)
    if not _is_readable(tls.key_file, "key_file", problems) or not has_certificate:
        return
    key = f"{_TLS}.key_file"
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file, password=_refuse_passphrase)
    except _EncryptedKeyError:
        problems.add_at(key, f"{tls.key_file} is encrypted: write it without a passphrase (see `openssl pkey`)")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problems.add_at(key, f"{tls.key_file} is not the key of the certificate in {tls.cert_file}")
        else:
            problems.add_at(key, f"{tls.key_file} holds no private key in PEM form that OpenSSL can use with"
                            f" {tls.cert_file} ({error.reason or error})")  # fmt: skip
    except OSError as error:  # it went away meanwhile
        problems.add_at(key, f"{tls.key_file}: {error.strerror}")


def _refuse_passphrase() -> str:
    raise _EncryptedKeyError


def _load_certificates(context: ssl.SSLContext, path: Path, name: str, problems: Problems) -> bool:
    """Takes the file's certificates as those that are trusted; False when it has none."""
    if not _is_readable(path, name, problems):
        return False
    try:
        context.load_verify_locations(cafile=str(path))
    except ssl.SSLError as error:
        problems.add_at(f"{_TLS}.{name}", f"{path} holds no certificate in PEM form ({error.reason or error})")
        return False
    except OSError as error:
        problems.add_at(f"{_TLS}.{name}", f"{path}: {error.strerror}")
        return False
    return True


def _is_readable(path: Path, name: str, problems: Problems) -> bool:
    """OpenSSL would wait for ever for a FIFO."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            problems.add_at(f"{_TLS}.{name}", f"{path} is not a regular file")
            return False
        path.open("rb").close()
    except OSError as error:
        problems.add_at(f"{_TLS}.{name}", f"{path}: {error.strerror}; the service's user must be able to read it")
        return False
    return True


def has_allowed_name(certificate: Mapping[str, Any] | None, allowed: tuple[str, ...]) -> bool:
    """Whether a subjectAltName of the certificate (as getpeercert gives it) is one of those that are allowed."""
    found = (certificate or {}).get("subjectAltName", ())
    names = {_same_form(value) for kind, value in found if kind in ("DNS", "IP Address", "URI", "email")}
    return not names.isdisjoint(_same_form(name) for name in allowed)


def _same_form(name: str) -> str:
    """An IPv6 address can be written in many ways; every other name must be the same, letter by letter."""
    try:
        return str(ipaddress.ip_address(name.strip()))
    except ValueError:
        return name
