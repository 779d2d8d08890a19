"""One utility call to many engines at once: who is meant, and what each of them said. Owner: the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from google.protobuf.message import Message

from frontend.engine_client.connection import EngineConnection
from frontend.engine_client.wire import to_engine_error
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.errors import InvalidRequestError, StepwireError, UnavailableError

# A frame too large for gRPC would end the stream, and a large one holds up everything behind it.
MAX_ARGS_BYTES = 8 * 2**20


async def call_engines(
    connections: Sequence[EngineConnection], engine_ids: Sequence[str], args: Message, timeout_s: float | None
) -> dict[str, Message]:
    """Each engine's result, or its EngineError, by engine id. No ids = all that are attached.

    Raises StepwireError when no attached engine is meant; a missing one among several is an error of that one.
    """
    if args.ByteSize() > MAX_ARGS_BYTES:
        size = f"{args.ByteSize()} bytes are more than the {MAX_ARGS_BYTES} of one call"
        raise InvalidRequestError.of_field("args", f"{size}: a tensor may come in pieces, each with its offset")
    attached = {connection.engine_id: connection for connection in connections if connection.is_attached}
    wanted = list(dict.fromkeys(engine_ids)) or list(attached)
    present = [engine_id for engine_id in wanted if engine_id in attached]
    if not present:
        names = f"of the name {' or '.join(wanted)}" if wanted else "at all"
        raise StepwireError(f"no engine {names} is attached", reason="ENGINE_NOT_FOUND")
    answers = await asyncio.gather(*(attached[engine_id].call_utility(args, timeout_s) for engine_id in present))
    known = {connection.engine_id: connection for connection in connections}
    missing = {
        engine_id: to_engine_error(_why_missing(engine_id, known.get(engine_id)))
        for engine_id in wanted
        if engine_id not in attached
    }
    return dict(zip(present, answers, strict=True)) | missing


async def drain_engines(
    connections: Sequence[EngineConnection], timeout_ms: int, reason: str, timeout_s: float | None
) -> None:
    """Tell every attached engine to shut down; one that does already, or that goes meanwhile, is no failure."""
    args = pb.DrainArgs(timeout_ms=timeout_ms, reason=reason)
    if any(connection.is_attached for connection in connections):
        await call_engines(connections, (), args, timeout_s)


def _why_missing(engine_id: str, connection: EngineConnection | None) -> StepwireError:
    if connection is None:
        return StepwireError(f"no engine has the id {engine_id}", reason="ENGINE_NOT_FOUND")
    return connection.last_error or UnavailableError(f"engine {engine_id} is {connection.state.value}")
