"""A certificate for 127.0.0.1, made by the openssl program: kubectl sends no token to a server without TLS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

from openforgerl.errors import InputError

NAME = "IP:127.0.0.1,DNS:localhost"


def can_make() -> bool:
    """Whether openssl is here."""
    return shutil.which("openssl") is not None


def make(folder: Path) -> tuple[ssl.SSLContext, bytes]:
    """(the server's context, the certificate as PEM, which signs itself). Raises InputError without openssl."""
    if not can_make():
        raise InputError("tls needs the openssl program: install it (`apt-get install openssl`), or leave tls off")
    key, certificate = folder / "server.key", folder / "server.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=fake-kubernetes", "-addext", f"subjectAltName={NAME}"]
    words += ["-keyout", str(key), "-out", str(certificate)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InputError(f"openssl could not make a certificate: {done.stderr.strip()[-500:]}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate.read_bytes()
