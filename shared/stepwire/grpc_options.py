"""gRPC channel and server options: the only place where they are written. Why each has its value: docs/adr/0004."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

Options = list[tuple[str, int | str]]

# While a ping of gRPC's flow control is on its way, no keepalive ping is sent: it has to be lost after the same time.
_PING_TIMEOUT = "grpc.http2.ping_timeout_ms"

_REUSE_PORT = "grpc.so_reuseport"
_MESSAGE_LENGTHS: Options = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

# Both servers. so_reuseport 0: a second process must fail to bind instead of silently taking half of the traffic.
SERVER: Options = [
    *_MESSAGE_LENGTHS,
    (_REUSE_PORT, 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    (_PING_TIMEOUT, 40_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients may ping every 10 s during a long silent generation; by default pings closer than 300 s get them cut off.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]

# The public port only: an age makes clients resolve DNS again. On the engine port it would kill the stream.
PUBLIC_SERVER: Options = [
    *SERVER,
    # Calls that came together and that the event loop has not taken up yet: above 1 000 gRPC by default ends some of
    # them CANCELLED, before admission could refuse them with a reason and a time to come back.
    ("grpc.server.max_pending_requests", 10_000),
    ("grpc.server.max_pending_requests_hard_limit", 10_000),
    ("grpc.max_connection_age_ms", 600_000),
    ("grpc.max_connection_age_grace_ms", 3_600_000),
    ("grpc.max_connection_idle_ms", 900_000),
]

# The public port of several workers that share it on purpose, which somebody else holds for them.
SHARED_PUBLIC_SERVER: Options = [
    *(option for option in PUBLIC_SERVER if option[0] != _REUSE_PORT),
    (_REUSE_PORT, 1),
]

# Frontend to engine: one channel for each engine, no shared connection.
ENGINE_CHANNEL: Options = [
    *_MESSAGE_LENGTHS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    (_PING_TIMEOUT, 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
]

# The name that the certificate of an engine has to have, where that is not its address.
TARGET_NAME = "grpc.ssl_target_name_override"

# Clients of the public port. What is repeated by itself, and how, is in clients/service_config.json.
CLIENT_CHANNEL: Options = [
    *_MESSAGE_LENGTHS,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    (_PING_TIMEOUT, 40_000),
    ("grpc.enable_retries", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]
