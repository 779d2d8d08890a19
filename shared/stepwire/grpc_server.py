"""What both gRPC servers do alike, threaded or asyncio: bind with a clear error, and offer reflection."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from stepwire.listen_address import bind_error, join
from stepwire.tls import TlsFiles, server_credentials


def bind(server: grpc.Server | grpc.aio.Server, host: str, port: int, tls: TlsFiles | None = None) -> int:
    """Listen, with TLS if there are files for it; returns the port asked for, or found for 0. Raises BindError.

    Server options must hold so_reuseport = 0, or a second process would share the port unnoticed.
    """
    try:
        if tls is None:
            bound = server.add_insecure_port(join(host, port))
        else:
            bound = server.add_secure_port(join(host, port), server_credentials(tls))
    except RuntimeError:
        raise bind_error(host, port) from None
    if not bound:
        raise bind_error(host, port)
    return bound


def enable_reflection(server: grpc.Server | grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Describe these services, health and reflection itself to clients such as grpcurl."""
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
