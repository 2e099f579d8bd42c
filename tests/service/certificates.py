"""Certificates made on the spot by the openssl command, in the files that a web configuration names."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def need_openssl() -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")


class Certificates:
    """A directory with a CA and what it has signed: <name>.crt and <name>.key each."""

    def __init__(self, root: Path) -> None:
        need_openssl()
        self.root = root
        root.mkdir(exist_ok=True)
        self.make("ca", "basicConstraints=critical,CA:TRUE", by=None)

    def make(self, name: str, *extensions: str, by: str | None = "ca") -> None:
        """A new key and its certificate, in place of what was there under this name."""
        signed = ["-CA", str(self.root / f"{by}.crt"), "-CAkey", str(self.root / f"{by}.key")] if by else []
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
             "-days", "2", "-subj", f"/CN={name}", "-config", "/dev/null",
             "-keyout", str(self.root / f"{name}.key"), "-out", str(self.root / f"{name}.crt"), *signed,
             *(word for extension in extensions for word in ("-addext", extension))],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip

    def server(self, name: str = "web") -> None:
        self.make(name, "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1", "basicConstraints=critical,CA:FALSE")

    def client(self, name: str, *names: str, by: str = "ca") -> None:
        self.make(name, f"subjectAltName={','.join(names)}", "basicConstraints=critical,CA:FALSE", by=by)

    def trusting(self, client: str | None = None) -> ssl.SSLContext:
        """What a client uses that knows the CA, with a certificate of its own if it has one."""
        context = ssl.create_default_context(cafile=str(self.root / "ca.crt"))
        if client is not None:
            context.load_cert_chain(self.root / f"{client}.crt", self.root / f"{client}.key")
        return context

    def serial(self, name: str) -> str:
        return ssl.PEM_cert_to_DER_cert((self.root / f"{name}.crt").read_text()).hex()
