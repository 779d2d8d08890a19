"""The channel to one engine: in clear, or with TLS and, where the engine asks for one, a certificate of ours."""

from __future__ import annotations

import grpc.aio

from frontend.engine_client.connection_state import ClientIdentity
from stepwire import grpc_options
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.stream_meter import StreamMeter
from stepwire.tls import channel_credentials

UNIX_PREFIX = "unix:"
CONNECT_METHOD = "/stepwire.engine.v1.EngineCoreService/Connect"


def open_channel(endpoint: str, identity: ClientIdentity) -> grpc.aio.Channel:
    """A socket of this host is guarded by its permissions, and never has TLS."""
    options = list(grpc_options.ENGINE_CHANNEL)
    if identity.tls is None or endpoint.startswith(UNIX_PREFIX):
        return grpc.aio.insecure_channel(endpoint, options=options)
    if identity.tls_server_name:
        options.append((grpc_options.TARGET_NAME, identity.tls_server_name))
    return grpc.aio.secure_channel(endpoint, channel_credentials(identity.tls), options=options)


def open_stream(
    channel: grpc.aio.Channel, meter: StreamMeter
) -> grpc.aio.StreamStreamCall[pb.ConnectRequest, pb.ConnectResponse]:
    """EngineCoreService.Connect, whose frames the meter counts where they are bytes."""
    connect = channel.stream_stream(
        CONNECT_METHOD,
        request_serializer=meter.serializer(pb.ConnectRequest.SerializeToString),
        response_deserializer=meter.deserializer(pb.ConnectResponse.FromString),
    )
    return connect(None, wait_for_ready=True)
