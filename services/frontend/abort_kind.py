"""Why the frontend ends a request in the engine: the labels of the wire's AbortReason, free of protobuf."""

from __future__ import annotations

import enum


class AbortKind(enum.Enum):
    """Who or what ended the request; a label of the aborted counter."""

    # Cancelled, or the connection broke.
    CLIENT_CANCELLED = "client_cancelled"
    DEADLINE = "deadline"
    # A stop string matched; the caller already has its STOP.
    STOP_STRING = "stop_string"
    # The caller did not read its answers.
    SLOW_CLIENT = "slow_client"
    SHUTDOWN = "shutdown"
    # The output processor failed on this request.
    FRONTEND_ERROR = "frontend_error"
    # An operator, an Abort call, or a request one of whose choices failed.
    REQUESTED = "requested"
