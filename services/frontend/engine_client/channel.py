"""The channel to one engine: in clear, or with TLS and, where the engine asks for one, a certificate of ours."""

from __future__ import annotations

import grpc.aio

from frontend.engine_client.connection_state import ClientIdentity
from stepwire import grpc_options
from stepwire.tls import channel_credentials

UNIX_PREFIX = "unix:"


def open_channel(endpoint: str, identity: ClientIdentity) -> grpc.aio.Channel:
    """A socket of this host is guarded by its permissions, and never has TLS."""
    options = list(grpc_options.ENGINE_CHANNEL)
    if identity.tls is None or endpoint.startswith(UNIX_PREFIX):
        return grpc.aio.insecure_channel(endpoint, options=options)
    if identity.tls_server_name:
        options.append((grpc_options.TARGET_NAME, identity.tls_server_name))
    return grpc.aio.secure_channel(endpoint, channel_credentials(identity.tls), options=options)
