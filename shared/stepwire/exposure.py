"""Which addresses may be bound how: the refusals of unsafe combinations, the same for both services. Pure."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from stepwire.tls import TlsFiles


def is_loopback(host: str) -> bool:
    """Whether only this host can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_tls_files(prefix: str, cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """The files of flags like --tls-cert-file; None = no TLS. Raises ValueError that names the flag."""
    if (cert is None) != (key is None):
        raise ValueError(f"{prefix}-cert-file and {prefix}-key-file go together: one is missing")
    files = TlsFiles(cert, key, ca)
    if not files.paths:
        return None
    try:
        files.check()
    except ValueError as error:
        raise ValueError(f"{prefix}-cert-file, {prefix}-key-file: {error}") from None
    return files


def check_server_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    """The same for a server, which cannot have TLS without a certificate."""
    if client_ca is not None and cert is None:
        raise ValueError("--tls-client-ca-file needs --tls-cert-file: without TLS there are no client certificates")
    return check_tls_files("--tls", cert, key, client_ca)


def refuse_exposed(flag: str, host: str, what: str, remedy: str) -> ValueError:
    """The error for an address that others can reach."""
    return ValueError(f"{flag} {host} would {what}: {remedy}, or --insecure if the network is trusted")
