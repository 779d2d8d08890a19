"""All engines of this frontend: draws handles, picks an engine for each request, and knows which handle runs where.

Owner: the event loop. A handle is drawn once and never again in the life of the process, so that it is unique in the
session of every engine. Its route lives from submit to the engine's Finish, or to the loss of the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from frontend.abort_kind import AbortKind
from frontend.engine_client.availability import why_unavailable
from frontend.engine_client.balancer import pick
from frontend.engine_client.connection import EngineConnection
from frontend.engine_client.connection_state import ClientIdentity, ConnectionState, EngineRefusedError
from frontend.engine_client.engine_facts import EngineFacts, strictest
from frontend.engine_client.tokenizer_store import TokenizerStore
from frontend.engine_client.wire import to_abort_reason
from frontend.engine_outputs import EngineFinishReason, EngineOutput
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.errors import StepwireError, UnavailableError

logger = logging.getLogger(__name__)

# (handle, now) -> the request as it goes on the wire; called again when the request is sent to another engine
MakeRequest = Callable[[int, float], pb.EngineCoreRequest]

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
    make: MakeRequest
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

    def submit(self, handles: Sequence[int], makes: Sequence[MakeRequest]) -> str:
        """Send one request, all its choices to one engine, and return the engine's id. Raises UnavailableError.

        No await: whoever is to receive the outputs may register before or after, in the same turn of the loop.
        """
        connection = self._pick()
        now = time.monotonic()
        requests = [make(handle, now) for handle, make in zip(handles, makes, strict=True)]
        for handle, make, request in zip(handles, makes, requests, strict=True):
            self._routes[handle] = _Route(connection, make)
            connection.submit(request)
        return connection.engine_id

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

    def engine_of(self, handle: int) -> str:
        """Id of the engine a live handle runs on, or empty."""
        route = self._routes.get(handle)
        return route.connection.engine_id if route else ""

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

    async def on_attach(self, connection: EngineConnection, facts: EngineFacts, tokenizer_dir: Path) -> None:
        # One at a time, or two different engines that come at once would not see each other.
        async with self._attaching:
            peers = [
                peer.facts
                for peer in self.connections
                if peer is not connection and peer.state is ConnectionState.READY and peer.facts is not None
            ]
            for peer in peers:
                if peer.identity != facts.identity:
                    raise EngineRefusedError(
                        f"engine {connection.endpoint} serves {_describe(facts)}, but engine {peer.engine_id} serves "
                        f"{_describe(peer)}; the engines of one frontend must agree"
                    )
            await self._listener.on_attach(strictest(facts, peers), tokenizer_dir)

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
        self._routes[handle] = _Route(other, route.make, is_second_try=True)
        other.submit(route.make(handle, time.monotonic()))
        return True


def _describe(facts: EngineFacts) -> str:
    return f"{facts.model} (revision {facts.revision or 'unknown'}, tokenizer {facts.tokenizer_sha256[:12]})"
