"""A synchronous client of the admin port; safe to share between threads.

Requests and answers are the messages of stepwire.v1. It never repeats a call: one that was answered with an error may
have had an effect.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import grpc

from stepwire.v1 import admin_service_pb2_grpc
from stepwire_client.credentials import NO_CREDENTIALS, Credentials
from stepwire_client.errors import CallError

DEFAULT_ADMIN_TARGET = "127.0.0.1:50052"


class AdminClient:
    """`stub` has the RPCs; `call` makes one and turns its failure into CallError."""

    def __init__(self, target: str = DEFAULT_ADMIN_TARGET, *, credentials: Credentials = NO_CREDENTIALS) -> None:
        self.target = target
        self._channel = credentials.channel(target)
        self._metadata = credentials.metadata
        self.stub = admin_service_pb2_grpc.AdminServiceStub(self._channel)

    def call(self, rpc: Any, request: Any, *, timeout_s: float | None = None) -> Any:
        """The response of `client.call(client.stub.Pause, PauseRequest(...))`; raises CallError."""
        try:
            return rpc(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise CallError.from_rpc_error(error) from error

    def close(self) -> None:
        """Cancels every call that still runs."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
