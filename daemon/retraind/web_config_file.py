"""The web configuration file -> WebConfig: what no key of it can tell alone, and its paths made absolute.

Reads the one YAML file through config_file's walker. What lies in the files that it names (certificates, keys) is the
business of supervisor/web_tls, which adds its problems to the same list. Raises ConfigError for a file that can not
be read at all.
"""

from pathlib import Path

import msgspec

from retraind import config_file
from retraind.config_file import Problems
from retraind.web_config import TlsServerConfig, WebConfig

_TLS = "tls_server_config"
_USERS = "basic_auth_users"
_REQUIRED = "RequireAndVerifyClientCert"


def read(path: Path) -> tuple[WebConfig, Problems]:
    """What the file says, paths relative to it, and what is wrong with it. Raises ConfigError."""
    config, problems = config_file.read(path, WebConfig)
    if config.tls_server_config is not None:
        tls = _absolute(config.tls_server_config, path.absolute().parent)
        config = msgspec.structs.replace(config, tls_server_config=tls)
        if _TLS not in problems.keys:
            _check_tls(tls, problems)
    _check_users(config, problems)
    if not problems.found and not config.protections():
        problems.add(1, "", f"has neither {_TLS} nor {_USERS}: for plain HTTP without a password set metrics.web_config"
                     " to null")  # fmt: skip
    return config, problems


def _absolute(tls: TlsServerConfig, base: Path) -> TlsServerConfig:
    paths = {name: getattr(tls, name) for name in ("cert_file", "key_file", "client_ca_file")}
    changes = {name: base / path for name, path in paths.items() if path is not None}
    return msgspec.structs.replace(tls, **changes)


def _check_tls(tls: TlsServerConfig, problems: Problems) -> None:
    # Another format's reader would take a section without a certificate for plain HTTP: here it is a mistake.
    for name, value in (("cert_file", tls.cert_file), ("key_file", tls.key_file)):
        if value is None:
            _add(problems, name, "is missing: TLS needs both cert_file and key_file")
    if tls.min_version > tls.max_version:
        _add(problems, "max_version", f"{tls.max_version} is below min_version {tls.min_version}")
    if f"{_TLS}.client_auth_type" not in problems.keys:
        _check_clients(tls, problems)


def _check_clients(tls: TlsServerConfig, problems: Problems) -> None:
    kind = tls.client_auth_type
    if kind in ("RequestClientCert", "RequireClientCert", "RequireAnyClientCert"):
        words = "a client's certificate is verified here or not asked for"
        _add(problems, "client_auth_type", f"{kind} is not supported: {words}; use {_REQUIRED} with client_ca_file")
    elif kind == "NoClientCert" and tls.client_ca_file is not None:
        _add(problems, "client_ca_file", f"has no effect with client_auth_type NoClientCert: set that to {_REQUIRED}")
    elif kind != "NoClientCert" and tls.client_ca_file is None:
        _add(problems, "client_ca_file", f"is missing: {kind} needs the certificates that clients are verified with")
    if tls.client_allowed_sans is not None:
        if kind != _REQUIRED:
            _add(problems, "client_allowed_sans", f"needs client_auth_type {_REQUIRED}: others let clients in without")
        if not tls.client_allowed_sans:
            _add(problems, "client_allowed_sans", "is empty, so nobody could connect: name one, or take the key out")


def _add(problems: Problems, name: str, problem: str) -> None:
    """Unless the key is wrong by itself: then its value is not known, and one line about it is enough."""
    if f"{_TLS}.{name}" not in problems.keys:
        problems.add_at(f"{_TLS}.{name}", problem)


def _check_users(config: WebConfig, problems: Problems) -> None:
    has_names = any(key.startswith(f"{_USERS}.") for key in problems.lines)
    if _USERS in problems.lines and not has_names and _USERS not in problems.keys:
        problems.add_at(_USERS, "names nobody: add a user, or take the key out")
    for name in config.basic_auth_users:
        if not name or ":" in name or not name.isprintable():
            problems.add_at(f"{_USERS}.{name}", f"{name!a} is no user name: it must be text without `:`")
