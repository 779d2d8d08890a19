"""TLS of our ports and channels, from PEM files. A server reads them again when they change, without a restart.

Runs in whatever thread gRPC makes a handshake in. A pair that does not fit together is never put in force.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

logger = logging.getLogger(__name__)

_Stamps = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate chain, its key, and the CAs of the peers: for a server, those whose clients it lets in."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.cert, self.key, self.ca) if path is not None)

    def check(self) -> None:
        """Raises ValueError, naming the file, unless they can be read and belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for path in self.paths:
            if not path.is_file():
                raise ValueError(f"{path} is not a file")
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password=_no_password)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            names = " and ".join(map(str, self.paths))
            raise ValueError(f"{names} are no usable PEM files that belong together: {error}") from None

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Chain, key, CAs."""
        cert, key, ca = (path.read_bytes() if path is not None else None for path in (self.cert, self.key, self.ca))
        return cert, key, ca

    def stamps(self) -> _Stamps:
        """Change with the files, also when a link is pointed elsewhere."""
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in (path.stat() for path in self.paths))


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """With a CA, clients need a certificate of it. Raises ValueError when the files are no good."""
    reloading = _Reloading(files)
    return grpc.dynamic_ssl_server_credentials(
        reloading.configuration(),
        reloading.fetch,  # type: ignore[arg-type]  # the stubs do not know that None means "as before"
        require_client_authentication=files.ca is not None,
    )


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """The same for a server that is not gRPC's."""
    stamps = files.stamps()
    context = _context(files)

    def look_again(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context_used: ssl.SSLContext) -> None:
        """Called at each handshake."""
        nonlocal stamps, context
        try:
            now = files.stamps()
            if now != stamps:
                context, stamps = _context(files), now
                logger.info("read the TLS files again: %s", ", ".join(map(str, files.paths)))
        except (OSError, ValueError) as error:
            # Half of a pair may have been written: the next handshake looks again.
            logger.warning("the TLS files stay as they were: %s", error)
        connection.context = context

    context.sni_callback = look_again
    return context


def _context(files: TlsFiles) -> ssl.SSLContext:
    files.check()
    if files.cert is None:
        raise ValueError("a server needs a certificate and its key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key, password=_no_password)
    if files.ca is not None:
        context.load_verify_locations(files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Trusts the CAs alone, or those of the host without them."""
    cert, key, ca = files.read()
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


class _Reloading:
    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamps = files.stamps()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        self._files.check()
        cert, key, ca = self._files.read()
        if cert is None or key is None:
            raise ValueError("a server needs a certificate and its key")
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called at each handshake; None = as before."""
        try:
            stamps = self._files.stamps()
            if stamps == self._stamps:
                return None
            configuration = self.configuration()
        except (OSError, ValueError) as error:
            # Half of a pair may have been written: the next handshake looks again.
            logger.warning("the TLS files stay as they were: %s", error)
            return None
        self._stamps = stamps
        logger.info("read the TLS files again: %s", ", ".join(map(str, self._files.paths)))
        return configuration


def _no_password() -> str:
    """Otherwise the library asks on the terminal."""
    raise ValueError("the key has a password")
