"""All engines of this frontend: draws handles, picks an engine for each request, and knows which handle runs where.

`discovery` and `members` know which engines there are, `attach_check` whether one fits, `balancer` which is best.

Owner: the event loop. A handle is drawn once and never again in the life of the process, so that it is unique in the
session of every engine. Its route lives from submit until the engine's Finish has been processed, or to the loss of the
engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import zlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from frontend.abort_kind import AbortKind
from frontend.engine_client.attach_check import check_agreement, check_identity
from frontend.engine_client.availability import why_unavailable
from frontend.engine_client.balancer import Balancer, LeastLoaded, PickReason
from frontend.engine_client.clock_offset import ClockOffset
from frontend.engine_client.connection import EngineConnection
from frontend.engine_client.connection_state import ClientIdentity, ConnectionState, EngineRefusedError
from frontend.engine_client.discovery import Discovery
from frontend.engine_client.engine_facts import EngineFacts, EngineLoad, EngineState, strictest
from frontend.engine_client.kv_events import KvEventFeed, KvEventFeeds
from frontend.engine_client.members import Members
from frontend.engine_client.outbox import NewRequest
from frontend.engine_client.tokenizer_store import TokenizerStore
from frontend.engine_client.transport_stats import TransportStats
from frontend.engine_client.wire import to_abort_reason
from frontend.engine_outputs import EngineFinishReason, EngineOutput
from frontend.retry_advice import RETRY_AFTER_MS
from stepwire.errors import EngineDeadError, InvalidRequestError, StepwireError, UnavailableError

logger = logging.getLogger(__name__)

# Metadata by which a caller pins a request to a rank.
RANK_FIELD = "x-data-parallel-rank"
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

    def on_limits(self, facts: EngineFacts) -> None:
        """The strictest limits of the engines that are left."""

    def on_picked(self, reason: PickReason) -> None: ...

    def on_engine_lost(self, engine_id: str, error: StepwireError) -> None: ...

    def on_engine_refused(self, error: EngineRefusedError) -> None: ...

    def on_batch_gap(self, engine_id: str, num_missing: int) -> None: ...


@dataclass(slots=True)
class _Route:
    connection: EngineConnection
    request: NewRequest
    # Whether another engine may get it when this one does not take it.
    may_move: bool
    # The engine has said something about it.
    is_answered: bool = False
    # Its Finish is here; the route stays until that has been processed.
    is_finished: bool = False


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
        stats: TransportStats | None = None,
    ) -> None:
        self._stats = stats = stats or TransportStats()

        def connect(address: str) -> EngineConnection:
            return EngineConnection(address, identity, tokenizers, self, ready_timeout_s=ready_timeout_s, stats=stats)

        self._listener = listener
        self._kv_event_feeds = KvEventFeeds(identity)
        self._handles = itertools.count(1)
        self._routes: dict[int, _Route] = {}
        self._attaching = asyncio.Lock()
        # Frontends that start together should not all begin with the same engine.
        self._balancer: Balancer = LeastLoaded(zlib.crc32(identity.session_id.encode()))
        self._discovery = Discovery(endpoints, lambda addresses: self._members.update(addresses))
        self._members = Members(self._discovery.listed, connect, self._is_busy, self._on_gone)

    def start(self) -> None:
        """Begin to look for engines and to connect to them."""
        self._members.start()
        self._discovery.start()

    async def close(self, reason: str, *, abort_running: bool = True) -> None:
        """Say Goodbye to all engines; requests still running must have been failed before."""
        self._discovery.close()
        self._kv_event_feeds.close()
        await self._members.close(reason, abort_running=abort_running)

    @property
    def connections(self) -> list[EngineConnection]:
        """To every engine that is known, whatever its state."""
        return self._members.connections

    @property
    def num_routes(self) -> int:
        """Handles that engines still owe an end; 0 when idle."""
        return len(self._routes)

    @property
    def is_available(self) -> bool:
        """At least one engine takes requests."""
        return any(connection.is_available for connection in self.connections)

    def kv_events(self, start_sequence: int) -> AbstractAsyncContextManager[KvEventFeed]:
        """The feed of the only engine. Raises UnavailableError, or InvalidRequestError when there are several.

        Each has numbers of its own, and who gets a request is decided here: one stream of several would help nobody.
        """
        engines = [connection for connection in self.connections if connection.is_available]
        if not engines:
            raise self.unavailable_error()
        if len(engines) > 1:
            text = f"{len(engines)} engines are behind this frontend; each one's KvEventsService has its events"
            raise InvalidRequestError(text, reason="UNSUPPORTED_FEATURE")
        return self._kv_event_feeds.open(engines[0].endpoint, start_sequence)

    def draw_handles(self, num: int) -> list[int]:
        """New handles."""
        return list(itertools.islice(self._handles, num))

    def submit(self, requests: Sequence[NewRequest], rank: int | None = None) -> None:
        """Send one request, all its choices to one engine; to one of this rank if the caller has named it.

        Raises UnavailableError, and InvalidRequestError for a rank that no engine can have. No await: whoever is to
        receive the outputs may register before or after, in the same turn of the loop.
        """
        if rank is None:
            connection = self._pick(self.connections, PickReason.LOAD)
        else:
            connection = self._pick(self._of_rank(rank), PickReason.PINNED)
        for request in requests:
            self._routes[request.handle] = _Route(connection, request, may_move=rank is None)
            connection.submit(request)

    def abort(self, handles: Sequence[int], kind: AbortKind) -> None:
        """End requests. Synchronous; unknown handles are skipped; the routes stay until the engine has answered."""
        by_connection: dict[EngineConnection, list[int]] = {}
        for handle in handles:
            route = self._routes.get(handle)
            if route is not None and not route.is_finished:
                route.may_move = False
                by_connection.setdefault(route.connection, []).append(handle)
        for connection, its_handles in by_connection.items():
            connection.abort(its_handles, to_abort_reason(kind))

    def engine_of(self, handle: int) -> EngineFacts | None:
        """The engine a live handle runs on."""
        route = self._routes.get(handle)
        return route.connection.facts if route else None

    def clock_of(self, engine: EngineFacts | None) -> ClockOffset | None:
        """How the clock of this life of an engine stands to ours; None as long as nobody knows."""
        clock = None if engine is None else self._stats.clocks.get(engine.engine_id)
        is_its = clock is not None and engine is not None and clock.boot_id == engine.boot_id and clock.is_known
        return clock if is_its else None

    def load_of(self, engine_id: str) -> EngineLoad | None:
        """What this engine has last reported; None when it is not there."""
        return next((one.load for one in self.connections if one.facts and one.facts.engine_id == engine_id), None)

    def _pick(self, among: Sequence[EngineConnection], reason: PickReason) -> EngineConnection:
        available = [connection for connection in among if connection.is_available]
        if not available:
            raise why_unavailable(among)
        self._listener.on_picked(reason)
        # A paused engine only holds what it gets, and looks idle to the balancer.
        running = [connection for connection in available if connection.engine_state is EngineState.RUNNING]
        best = running or available
        return best[self._balancer.pick([connection.candidate for connection in best])]

    def _of_rank(self, rank: int) -> list[EngineConnection]:
        known = [(connection, connection.facts) for connection in self.connections if connection.facts is not None]
        if rank >= max((facts.data_parallel_size for _, facts in known), default=rank + 1):
            raise InvalidRequestError.of_field(RANK_FIELD, f"{rank} is not below the number of ranks of the engines")
        matching = [connection for connection, facts in known if facts.data_parallel_rank == rank]
        if not matching:
            raise UnavailableError(f"no engine of rank {rank} is attached", retry_after_ms=RETRY_AFTER_MS)
        return matching

    def _is_busy(self, connection: EngineConnection) -> bool:
        return any(route.connection is connection for route in self._routes.values())

    def unavailable_error(self) -> UnavailableError:
        """Why no engine takes requests, as the caller is told."""
        return why_unavailable(self.connections)

    # What the connections report.

    def on_found(self, connection: EngineConnection, facts: EngineFacts) -> None:
        peers = [(peer.endpoint, peer.boot) for peer in self.connections if peer is not connection]
        check_identity(connection.endpoint, facts, [(endpoint, boot) for endpoint, boot in peers if boot is not None])

    async def on_attach(self, connection: EngineConnection, facts: EngineFacts, tokenizer_dir: Path) -> None:
        # One at a time, or two different engines that come at once would not see each other.
        async with self._attaching:
            others = {
                peer: peer.facts for peer in self.connections if peer is not connection and peer.facts is not None
            }
            ready = [known for peer, known in others.items() if peer.state is ConnectionState.READY]
            # A draining engine's requests need the model that is loaded here now; when they have ended it may differ.
            busy = {route.connection for route in self._routes.values()}
            check_agreement(
                connection.endpoint, facts, [*ready, *(known for peer, known in others.items() if peer in busy)]
            )
            await self._listener.on_attach(strictest(facts, ready), tokenizer_dir)

    async def on_outputs(self, connection: EngineConnection, outputs: list[EngineOutput]) -> None:
        news = [output for output in outputs if not self._settle(output)]
        await self._listener.on_outputs(news)
        # Not in a `finally`: what was not processed, because the session ended meanwhile, must be failed by `on_lost`.
        for output in news:
            if output.finish is not None:
                self._routes.pop(output.handle, None)
        self._members.let_go()

    def on_lost(self, connection: EngineConnection, error: StepwireError) -> None:
        routes = {handle: route for handle, route in self._routes.items() if route.connection is connection}
        for handle in routes:
            del self._routes[handle]
        self._listener.on_engine_lost(connection.engine_id, error)
        lost = [handle for handle, route in routes.items() if not self._rescue(handle, route, error)]
        if lost:
            logger.warning("engine %s took %d requests with it", connection.engine_id, len(lost))
            self._listener.on_failed(lost, error)
        self._update_limits()
        self._members.let_go()

    def _rescue(self, handle: int, route: _Route, error: StepwireError) -> bool:
        """A request that crossed with the orderly end of its engine: unanswered means never begun."""
        is_death = isinstance(error, EngineDeadError)
        return not is_death and not route.is_answered and route.may_move and self._reroute(handle, route)

    def on_refused(self, error: EngineRefusedError) -> None:
        self._listener.on_engine_refused(error)

    def on_state(self, connection: EngineConnection) -> None:
        self._listener.on_change()

    def on_batch_gap(self, connection: EngineConnection, num_missing: int) -> None:
        self._listener.on_batch_gap(connection.engine_id, num_missing)

    def _settle(self, output: EngineOutput) -> bool:
        """Note what the engine says; True when the request goes to another engine and nobody must hear of it."""
        if output.finish is None and not output.events:
            return False
        route = self._routes.get(output.handle)
        if route is None or route.is_finished:
            return False
        if not route.is_answered:
            route.is_answered = True
            route.connection.note_answered()
        if output.finish is None:
            return False
        route.is_finished = True
        error = output.finish.error
        if not route.may_move or output.finish.reason is not EngineFinishReason.REJECTED or error is None:
            return False
        return error.reason in _REROUTED_REASONS and self._reroute(output.handle, route)

    def _reroute(self, handle: int, route: _Route) -> bool:
        """Once: the caller hears of a second refusal."""
        others = [connection for connection in self.connections if connection is not route.connection]
        try:
            other = self._pick(others, PickReason.RETRY)
        except UnavailableError:
            return False
        engine_ids = route.connection.engine_id, other.engine_id
        logger.debug("engine %s does not take a request, %s gets it", *engine_ids, extra=route.request.log_fields)
        self._routes[handle] = _Route(other, route.request, may_move=False)
        other.submit(route.request)
        if route.request.on_move is not None and other.facts is not None:
            route.request.on_move(other.facts)
        return True

    def _on_gone(self) -> None:
        self._update_limits()
        self._listener.on_change()

    def _update_limits(self) -> None:
        """Those of the engines that are left; with none left the last ones stay."""
        ready = [one.facts for one in self.connections if one.facts and one.state is ConnectionState.READY]
        if ready:
            self._listener.on_limits(strictest(ready[0], ready[1:]))
