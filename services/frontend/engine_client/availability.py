"""Why no engine takes requests now, in the words of the error table. Pure: looks at connections, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.engine_client.connection import EngineConnection
from frontend.engine_client.connection_state import ConnectionState
from frontend.engine_client.engine_facts import EngineState
from frontend.retry_advice import RETRY_AFTER_MS
from stepwire.errors import EngineDeadError, UnavailableError

# The engine that will be back soonest is the best answer.
_REASONS = ("ENGINE_STARTING", "DRAINING", "ENGINE_DEAD")


def why_unavailable(connections: Sequence[EngineConnection]) -> UnavailableError:
    """The error for a request that no engine can take."""
    if not connections:
        text = "no engine can serve now: nothing is known behind --engine-endpoints"
        return UnavailableError(text, retry_after_ms=RETRY_AFTER_MS)
    by_reason = {_reason(connection): connection for connection in connections}
    reason = next(reason for reason in _REASONS if reason in by_reason)
    return UnavailableError(
        f"no engine can serve now: {describe_state(by_reason[reason])}",
        reason=reason,
        retry_after_ms=RETRY_AFTER_MS,
    )


def describe_state(connection: EngineConnection) -> str:
    """Why this one takes no requests."""
    if connection.is_leaving:
        return f"engine {connection.engine_id} is no longer listed"
    if connection.state is ConnectionState.READY:
        return f"engine {connection.engine_id} is {connection.engine_state.name}"
    detail = f": {connection.last_error.message}" if connection.last_error else ""
    return f"engine {connection.engine_id} is {connection.state.value}{detail}"


def _reason(connection: EngineConnection) -> str:
    if connection.is_leaving or connection.state is ConnectionState.DRAINING:
        return "DRAINING"
    is_loading = connection.engine_state in (EngineState.STARTING, EngineState.WARMING_UP)
    if connection.facts is None or connection.last_error is None or is_loading:
        return "ENGINE_STARTING"
    if isinstance(connection.last_error, EngineDeadError):
        return "ENGINE_DEAD"
    return "DRAINING" if connection.last_error.reason == "DRAINING" else "ENGINE_STARTING"
