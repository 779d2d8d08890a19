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
# What gRPC says when HTTP/1, TLS or something else answers where HTTP/2 was expected.
FOREIGN_PROTOCOL = ("Failed parsing HTTP/2", "FRAME_SIZE_ERROR", "WRONG_VERSION_NUMBER", "http1.x")
ANOTHER_PROTOCOL = " (the peer speaks another protocol on this port; look at --engine-endpoints and TLS on both sides)"


def open_channel(endpoint: str, identity: ClientIdentity) -> grpc.aio.Channel:
    """A socket of this host is guarded by its permissions, and never has TLS."""
    options = list(grpc_options.ENGINE_CHANNEL)
    if identity.tls is None or endpoint.startswith(UNIX_PREFIX):
        return grpc.aio.insecure_channel(endpoint, options=options)
    if identity.tls_server_name:
        options.append((grpc_options.TARGET_NAME, identity.tls_server_name))
    return grpc.aio.secure_channel(endpoint, channel_credentials(identity.tls), options=options)


def why_silent(error: grpc.aio.AioRpcError) -> str:
    """The status of a call to an engine in words, for the operator: gRPC's own do not say what is behind the port."""
    said = error.details() or ""
    is_strange = any(sign in said for sign in FOREIGN_PROTOCOL)
    return f"{error.code().name}: {said}{ANOTHER_PROTOCOL if is_strange else ''}"


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
