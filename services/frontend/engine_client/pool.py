"""All engines of this frontend: draws handles, picks an engine for each request, and knows which handle runs where.

Owner: the event loop. A handle is drawn once and never again in the life of the process, so that it is unique in the
session of every engine. Its route lives from submit to the engine's Finish, or to the loss of the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from frontend.abort_kind import AbortKind
from frontend.engine_client.availability import why_unavailable
from frontend.engine_client.balancer import pick
from frontend.engine_client.connection import EngineConnection
from frontend.engine_client.connection_state import ClientIdentity, ConnectionState, EngineRefusedError
from frontend.engine_client.engine_facts import EngineFacts, strictest
from frontend.engine_client.outbox import NewRequest
from frontend.engine_client.tokenizer_store import TokenizerStore
from frontend.engine_client.wire import to_abort_reason
from frontend.engine_outputs import EngineFinishReason, EngineOutput
from stepwire.errors import StepwireError, UnavailableError

logger = logging.getLogger(__name__)

# Refusals that another engine may not repeat.
_REROUTED_REASONS = frozenset({"QUEUE_FULL", "DRAINING"})


class PoolListener(Protocol):
    """The frontend, as the pool sees it."""

    async def on_attach(self, facts: EngineFacts, tokenizer_dir: Path) -> None:
        """An engine fits; called before it gets requests, with the strictest limits of all attached engines."""

    async def on_outputs(self, outputs: Sequence[EngineOutput]) -> None: ...

    def on_failed(self, handles: list[int], error: StepwireError) -> None: ...

    def on_change(self) -> None:
        """Engines came or went."""

    def on_engine_lost(self, engine_id: str, error: StepwireError) -> None: ...

    def on_batch_gap(self, engine_id: str, num_missing: int) -> None: ...


@dataclass(slots=True)
class _Route:
    connection: EngineConnection
    request: NewRequest
    is_second_try: bool = False
    is_aborted: bool = False


class EnginePool:
    """Create, `start`, use, `close`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        identity: ClientIdentity,
        tokenizers: TokenizerStore,
        listener: PoolListener,
        *,
        ready_timeout_s: float,
    ) -> None:
        self.connections = [
            EngineConnection(endpoint, identity, tokenizers, self, ready_timeout_s=ready_timeout_s)
            for endpoint in endpoints
        ]
        self._listener = listener
        self._handles = itertools.count(1)
        self._routes: dict[int, _Route] = {}
        self._turn = 0
        self._attaching = asyncio.Lock()

    def start(self) -> None:
        """Begin to connect to all engines."""
        for connection in self.connections:
            connection.start()

    async def close(self, reason: str, *, abort_running: bool = True) -> None:
        """Say Goodbye to all engines; requests still running must have been failed before."""
        await asyncio.gather(
            *(connection.close(reason, abort_running=abort_running) for connection in self.connections)
        )

    @property
    def num_routes(self) -> int:
        """Handles that engines still owe an end; 0 when idle."""
        return len(self._routes)

    @property
    def is_available(self) -> bool:
        """At least one engine takes requests."""
        return any(connection.is_available for connection in self.connections)

    def draw_handles(self, num: int) -> list[int]:
        """New handles."""
        return list(itertools.islice(self._handles, num))

    def submit(self, requests: Sequence[NewRequest]) -> None:
        """Send one request, all its choices to one engine. Raises UnavailableError.

        No await: whoever is to receive the outputs may register before or after, in the same turn of the loop.
        """
        connection = self._pick()
        for request in requests:
            self._routes[request.handle] = _Route(connection, request)
            connection.submit(request)

    def abort(self, handles: Sequence[int], kind: AbortKind) -> None:
        """End requests. Synchronous; unknown handles are skipped; the routes stay until the engine has answered."""
        by_connection: dict[EngineConnection, list[int]] = {}
        for handle in handles:
            route = self._routes.get(handle)
            if route is not None:
                route.is_aborted = True
                by_connection.setdefault(route.connection, []).append(handle)
        for connection, its_handles in by_connection.items():
            connection.abort(its_handles, to_abort_reason(kind))

    def engine_of(self, handle: int) -> EngineFacts | None:
        """The engine a live handle runs on."""
        route = self._routes.get(handle)
        return route.connection.facts if route else None

    def _pick(self, exclude: EngineConnection | None = None) -> EngineConnection:
        candidates = [
            connection for connection in self.connections if connection.is_available and connection is not exclude
        ]
        if not candidates:
            raise self.unavailable_error()
        self._turn += 1
        return candidates[pick([candidate.score for candidate in candidates], self._turn)]

    def unavailable_error(self) -> UnavailableError:
        """Why no engine takes requests, as the caller is told."""
        return why_unavailable(self.connections)

    # What the connections report.

    def on_found(self, connection: EngineConnection, facts: EngineFacts) -> None:
        for peer in self.connections:
            if peer is not connection and peer.boot == facts.boot:
                raise EngineRefusedError(
                    f"{connection.endpoint} is engine {facts.engine_id}, which is attached at {peer.endpoint} already"
                )

    async def on_attach(self, connection: EngineConnection, facts: EngineFacts, tokenizer_dir: Path) -> None:
        # One at a time, or two different engines that come at once would not see each other.
        async with self._attaching:
            others = {
                peer: peer.facts for peer in self.connections if peer is not connection and peer.facts is not None
            }
            ready = [known for peer, known in others.items() if peer.state is ConnectionState.READY]
            # A draining engine's requests need the model that is loaded here now; when they have ended it may differ.
            busy = {route.connection for route in self._routes.values()}
            for known in (*ready, *(known for peer, known in others.items() if peer in busy)):
                if known.identity != facts.identity:
                    raise EngineRefusedError(
                        f"engine {connection.endpoint} serves {_describe(facts)}, but engine {known.engine_id} serves "
                        f"{_describe(known)}; the engines of one frontend must agree"
                    )
            await self._listener.on_attach(strictest(facts, ready), tokenizer_dir)

    async def on_outputs(self, connection: EngineConnection, outputs: list[EngineOutput]) -> None:
        await self._listener.on_outputs([output for output in outputs if not self._settle(output)])

    def on_lost(self, connection: EngineConnection, error: StepwireError) -> None:
        lost = [handle for handle, route in self._routes.items() if route.connection is connection]
        for handle in lost:
            del self._routes[handle]
        self._listener.on_engine_lost(connection.engine_id, error)
        if lost:
            logger.warning("engine %s took %d requests with it", connection.engine_id, len(lost))
            self._listener.on_failed(lost, error)

    def on_state(self, connection: EngineConnection) -> None:
        self._listener.on_change()

    def on_batch_gap(self, connection: EngineConnection, num_missing: int) -> None:
        self._listener.on_batch_gap(connection.engine_id, num_missing)

    def _settle(self, output: EngineOutput) -> bool:
        """Drop the route of a finished request; True when it goes to another engine and nobody must hear of it."""
        if output.finish is None:
            return False
        route = self._routes.pop(output.handle, None)
        if route is None or route.is_aborted or route.is_second_try:
            return False
        error = output.finish.error
        if output.finish.reason is not EngineFinishReason.REJECTED or error is None:
            return False
        return error.reason in _REROUTED_REASONS and self._reroute(output.handle, route)

    def _reroute(self, handle: int, route: _Route) -> bool:
        try:
            other = self._pick(exclude=route.connection)
        except UnavailableError:
            return False
        logger.debug("engine %s refused a request, %s gets it", route.connection.engine_id, other.engine_id)
        self._routes[handle] = _Route(other, route.request, is_second_try=True)
        other.submit(route.request)
        return True


def _describe(facts: EngineFacts) -> str:
    return f"{facts.model} (revision {facts.revision or 'unknown'}, tokenizer {facts.tokenizer_sha256[:12]})"
