"""Utility calls to one engine that wait for their result. Owner: the event loop.

A call is the typed arguments of an operation; the oneof of UtilityCall says which operation they belong to. Every call
ends: by its result, by its time, or at once when the engine is lost.
"""

from __future__ import annotations

import asyncio
import itertools
import logging

from google.protobuf.message import Message
from opentelemetry.trace import SpanKind, Status, StatusCode

from frontend.engine_client.outbox import Outbox
from frontend.engine_client.wire import to_engine_error
from stepwire import tracing
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.errors import StepwireError
from stepwire.v1 import common_pb2

logger = logging.getLogger(__name__)

# The engine gets less time than the caller has, and we wait longer than the engine: its own answer is the better one.
ENGINE_MARGIN_S = 0.1
WAIT_MARGIN_S = 0.05
# What engines take as 32 bits of milliseconds.
MAX_TIMEOUT_S = 4_000_000.0

# Full name of the arguments -> field of UtilityCall.
_OPERATIONS = {
    field.message_type.full_name: field.name
    for field in pb.UtilityCall.DESCRIPTOR.oneofs_by_name["call"].fields
    if field.message_type is not None
}


class UtilityCalls:
    """`outbox` is that of the open session; ids are never used twice, so that a late result finds nobody."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Message]] = {}

    async def call(self, outbox: Outbox, args: Message, timeout_s: float | None) -> Message:
        """The result of the operation, or an EngineError."""
        operation = _OPERATIONS[args.DESCRIPTOR.full_name]
        with tracing.tracer.start_as_current_span(f"engine_core.utility/{operation}", kind=SpanKind.CLIENT) as span:
            outcome = await self._call(outbox, args, timeout_s)
            if isinstance(outcome, common_pb2.EngineError):
                span.set_attribute("error.type", outcome.reason)
                span.set_status(Status(StatusCode.ERROR))
            return outcome

    async def _call(self, outbox: Outbox, args: Message, timeout_s: float | None) -> Message:
        call_id = next(self._ids)
        future = self._pending[call_id] = asyncio.get_running_loop().create_future()
        outbox.put(pb.ConnectRequest(utility=_make(call_id, args, timeout_s)))
        try:
            async with asyncio.timeout(None if timeout_s is None else timeout_s - WAIT_MARGIN_S):
                result: Message = await future
                return result
        except TimeoutError:
            return to_engine_error(StepwireError("the engine has not answered in time", reason="DEADLINE"))
        finally:
            del self._pending[call_id]

    def settle(self, result: pb.UtilityResult) -> None:
        """A result came in."""
        future = self._pending.get(result.call_id)
        if future is None or future.done():
            logger.debug("late result of utility call %d dropped", result.call_id)
            return
        kind = result.WhichOneof("result")
        if kind is not None:
            future.set_result(getattr(result, kind))
        else:
            future.set_result(result.error)

    def fail_all(self, error: StepwireError) -> None:
        """The engine is gone, and no result will come."""
        for future in self._pending.values():
            if not future.done():
                future.set_result(to_engine_error(error))


def _make(call_id: int, args: Message, timeout_s: float | None) -> pb.UtilityCall:
    call = pb.UtilityCall(call_id=call_id)
    if timeout_s is not None:
        call.timeout_ms = max(1, int(1000 * (min(timeout_s, MAX_TIMEOUT_S) - ENGINE_MARGIN_S)))
    operation: Message = getattr(call, _OPERATIONS[args.DESCRIPTOR.full_name])
    # A message without fields must still be there.
    operation.SetInParent()
    operation.MergeFrom(args)
    return call


def is_error(outcome: Message) -> bool:
    """Whether a call failed."""
    return isinstance(outcome, common_pb2.EngineError)
