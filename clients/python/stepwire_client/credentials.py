"""Who a client is and whom it trusts: a bearer token, and TLS from PEM files.

No error, log line or repr shows a token. gRPC quotes metadata that it can not send, so a token is checked before.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from stepwire import grpc_options
from stepwire.tls import TlsFiles, channel_credentials
from stepwire_client.service_config import service_config

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Credentials:
    """Any TLS file turns TLS on; without `tls_ca_file` the CAs of this host are trusted. Raises ValueError."""

    token: str = field(default="", repr=False)
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None

    def __post_init__(self) -> None:
        if not all("!" <= character <= "~" for character in self.token):
            raise ValueError("the token must be printable ASCII without spaces")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("a client certificate and its key come together")
        self._files.check()

    @property
    def has_tls(self) -> bool:
        return bool(self._files.paths)

    @property
    def metadata(self) -> Metadata:
        """To be sent with each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def _files(self) -> TlsFiles:
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.tls_ca_file)

    def channel(self, target: str, *, is_balanced: bool = False) -> grpc.Channel:
        """`is_balanced`: `target` names several servers, as dns:///name:50051 does, and calls go to them in turn."""
        options = _options(is_balanced=is_balanced)
        if not self.has_tls:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, channel_credentials(self._files), options=options)

    def aio_channel(self, target: str, *, is_balanced: bool = False) -> grpc.aio.Channel:
        """The same for asyncio."""
        options = _options(is_balanced=is_balanced)
        if not self.has_tls:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, channel_credentials(self._files), options=options)

    def ssl_context(self) -> ssl.SSLContext:
        """The same trust for a client that is not gRPC's."""
        context = ssl.create_default_context(cafile=self.tls_ca_file)
        if self.tls_cert_file is not None:
            context.load_cert_chain(self.tls_cert_file, self.tls_key_file)
        return context


NO_CREDENTIALS = Credentials()


def _options(*, is_balanced: bool) -> grpc_options.Options:
    return [*grpc_options.CLIENT_CHANNEL, ("grpc.service_config", service_config(is_balanced=is_balanced))]


def read_token(path: Path) -> str:
    """The one token that a file holds. Raises OSError or ValueError, neither of which quotes the file."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        raise ValueError("the token must be printable ASCII without spaces") from None
    if not token:
        raise ValueError("the token file is empty")
    return token
