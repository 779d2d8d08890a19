"""Puts the meter of frames between the engine stream and its bytes; other calls pass as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import grpc

from stepwire.stream_meter import StreamMeter


class StreamInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic for type checkers only
    """For one method."""

    def __init__(self, method: str, meter: StreamMeter) -> None:
        self._method = method
        self._meter = meter

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = continuation(handler_call_details)
        if handler is None or handler_call_details.method != self._method:
            return handler
        # A handler is a named tuple, which the stubs do not know.
        return cast(Any, handler)._replace(
            request_deserializer=self._meter.deserializer(handler.request_deserializer),
            response_serializer=self._meter.serializer(handler.response_serializer),
        )
