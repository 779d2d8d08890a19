"""One engine: a channel, one session at a time, and reconnecting for ever. Owner: one task on the event loop.

CONNECTING -> READY -> (DRAINING) -> LOST -> CONNECTING ... -> CLOSED. Only READY takes new requests. Whatever goes
wrong here costs the requests of this engine and nothing else.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from frontend.engine_client.balancer import Candidate
from frontend.engine_client.channel import open_channel, open_stream, why_silent
from frontend.engine_client.connection_state import (
    ClientIdentity,
    ConnectionState,
    EngineRefusedError,
    EngineStartTimeout,
)
from frontend.engine_client.engine_facts import EngineFacts, EngineLoad, EngineState
from frontend.engine_client.outbox import NewRequest
from frontend.engine_client.session import EngineSession
from frontend.engine_client.tokenizer_store import TokenizerStore
from frontend.engine_client.transport_stats import TransportStats
from frontend.engine_client.utility_calls import UtilityCalls
from frontend.engine_client.wire import to_engine_error, to_facts, to_loss
from frontend.engine_outputs import EngineOutput
from stepwire import __version__
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.engine.v1 import engine_core_pb2_grpc as pb_grpc
from stepwire.errors import EngineDeadError, StepwireError, UnavailableError
from stepwire.grpc_errors import reason_of

logger = logging.getLogger(__name__)

PROTOCOL = 1
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
# An engine that is away, loading or ending is asked again after this long.
INFO_POLL_S = 0.5
# Without an answer for this long it is not reachable.
INFO_TIMEOUT_S = 5.0
GOODBYE_TIMEOUT_S = 5.0


class ConnectionListener(Protocol):
    """The pool, as a connection sees it."""

    def on_found(self, connection: EngineConnection, facts: EngineFacts) -> None:
        """Before a session is opened, which would replace one with the same engine. Raises EngineRefusedError."""

    async def on_attach(self, connection: EngineConnection, facts: EngineFacts, tokenizer_dir: Path) -> None:
        """Raises EngineRefusedError when the engine does not fit."""

    async def on_outputs(self, connection: EngineConnection, outputs: list[EngineOutput]) -> None: ...

    def on_lost(self, connection: EngineConnection, error: StepwireError) -> None: ...

    def on_refused(self, error: EngineRefusedError) -> None:
        """The engine does not fit; said at each try."""

    def on_state(self, connection: EngineConnection) -> None: ...

    def on_batch_gap(self, connection: EngineConnection, num_missing: int) -> None: ...


class EngineConnection:
    """Call `start` once, and `close` once at the end."""

    def __init__(
        self,
        endpoint: str,
        identity: ClientIdentity,
        tokenizers: TokenizerStore,
        listener: ConnectionListener,
        *,
        ready_timeout_s: float,
        stats: TransportStats,
    ) -> None:
        self._stats = stats
        self.endpoint = endpoint
        self.state = ConnectionState.CONNECTING
        self.engine_state = EngineState.UNSPECIFIED
        # Of the last boot that was attached; None until then.
        self.facts: EngineFacts | None = None
        # Of the engine that is attached or about to be.
        self.boot: tuple[str, str] | None = None
        self.load = EngineLoad()
        # Why the engine is not attached now.
        self.last_error: StepwireError | None = None
        # Its address is no longer wanted: it is closed when what it runs has ended.
        self.is_leaving = False
        self._identity = identity
        self._tokenizers = tokenizers
        self._listener = listener
        self._ready_timeout_s = ready_timeout_s
        self._session: EngineSession | None = None
        self._utility_calls = UtilityCalls()
        self._num_unanswered = self._num_unreported = 0
        self._backoff_s = MIN_BACKOFF_S
        self._waiting_for = ""

    @property
    def engine_id(self) -> str:
        """The engine's name, or its address as long as it has not told."""
        return self.facts.engine_id if self.facts else self.endpoint

    @property
    def is_available(self) -> bool:
        """Whether new requests may go there now."""
        return self.state is ConnectionState.READY and self.engine_state.is_serving and not self.is_leaving

    @property
    def is_attached(self) -> bool:
        """Whether there is an engine to talk to, whatever its state."""
        return self._session is not None

    @property
    def candidate(self) -> Candidate:
        """What a balancer needs to know."""
        return Candidate(self.load, self._num_unreported)

    def start(self) -> None:
        """Begin to connect."""
        logger.info("waiting for engine %s", self.endpoint)
        self._channel = open_channel(self.endpoint, self._identity)
        self._stub = pb_grpc.EngineCoreServiceStub(self._channel)
        self._task = asyncio.create_task(self._run(), name=f"engine {self.endpoint}")

    def submit(self, request: NewRequest) -> None:
        """Queue a request; it is written in the next turn of the loop, together with the others of this one."""
        if self._session is None:
            raise UnavailableError("the engine is not attached")
        self._num_unanswered += 1
        self._num_unreported += 1
        self._session.outbox.add(request)

    def note_answered(self) -> None:
        """The engine has said the first word about a request; the next stats count it."""
        self._num_unanswered -= 1

    def set_leaving(self, is_leaving: bool) -> None:
        """Whether its address is wanted no more."""
        if is_leaving is not self.is_leaving:
            self.is_leaving = is_leaving
            what = "is no longer listed: no new requests" if is_leaving else "is listed again"
            logger.info("the address %s of engine %s %s", self.endpoint, self.engine_id, what)
            self._listener.on_state(self)

    def abort(self, handles: Sequence[int], reason: pb.AbortReason.ValueType) -> None:
        """Queue an abort; nothing happens when the engine is gone, and the requests with it."""
        if self._session is not None:
            self._session.outbox.abort(handles, reason)

    async def call_utility(self, args: Message, timeout_s: float | None) -> Message:
        """Run one operation on the engine; returns its result, or an EngineError. Ends at once when it is lost."""
        # After our Goodbye no result would come.
        if self._session is None or self.state is ConnectionState.CLOSED:
            return to_engine_error(UnavailableError("the engine is not attached"))
        return await self._utility_calls.call(self._session.outbox, args, timeout_s)

    async def close(self, reason: str, *, abort_running: bool) -> None:
        """Say Goodbye, read what is still coming for a short while, and let go."""
        self._set_state(ConnectionState.CLOSED)
        self._utility_calls.fail_all(UnavailableError("the frontend lets go of the engine", reason="DRAINING"))
        if self._session is not None:
            self._session.say_goodbye(reason, abort_running=abort_running)
            await asyncio.wait({self._task}, timeout=GOODBYE_TIMEOUT_S)
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._channel.close(None)

    async def _run(self) -> None:
        while self.state is not ConnectionState.CLOSED:
            try:
                await self._attach_and_serve()
            except StepwireError as error:
                self._lose(error)
            except grpc.aio.AioRpcError as error:
                self._lose(self._refusal(error))
            except Exception as error:
                # A spoiled frame, or our own fault: this engine's requests fail, the frontend lives and tries again.
                logger.exception("engine client of %s failed", self.endpoint)
                self._lose(to_loss("transport", "", f"internal error {type(error).__name__}"))
            await self._back_off()

    async def _attach_and_serve(self) -> None:
        self._set_state(ConnectionState.CONNECTING)
        info = await self._in_time(self._get_info())
        self._listener.on_found(self, info)
        self.boot = info.boot
        try:
            directory = await self._tokenizers.ensure(self._stub, info.tokenizer_sha256)
            await self._serve(info, directory)
        finally:
            self.boot = None

    async def _serve(self, info: EngineFacts, tokenizer_dir: Path) -> None:
        session = EngineSession(open_stream(self._channel, self._stats.meter), self, self._stats)
        try:
            facts = await self._in_time(session.open(self._hello(info)))
            await self._listener.on_attach(self, facts, tokenizer_dir)
            self._become_ready(session, facts)
            await session.run()
        finally:
            self._session = None
            session.cancel()

    async def _in_time(self, step: Awaitable[EngineFacts]) -> EngineFacts:
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                return await step
        except TimeoutError:
            raise EngineStartTimeout(
                f"engine {self.endpoint} was not ready within {self._ready_timeout_s:g} s "
                f"({self._waiting_for}); look at its log and at --engine-endpoints"
            ) from None

    async def _get_info(self) -> EngineFacts:
        """Ask until the engine can be reached, knows its model and is not ending. It answers in every state."""
        while True:
            info = await self._ask_info()
            if info is not None:
                self.engine_state = info.state
                is_loading = info.state in (EngineState.STARTING, EngineState.WARMING_UP)
                is_ending = info.state in (EngineState.DRAINING, EngineState.DEAD)
                if not is_ending and (info.tokenizer_sha256 or not is_loading):
                    self._waiting_for = "it answers, but not with Ready"
                    return info
                self._wait_for(f"it is {info.state.name}")
            await asyncio.sleep(INFO_POLL_S)

    async def _ask_info(self) -> EngineFacts | None:
        # Not wait_for_ready, which would hide why the engine can not be reached.
        try:
            answer = await self._stub.GetEngineInfo(pb.GetEngineInfoRequest(), timeout=INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            self._wait_for(why_silent(error))
            return None
        return to_facts(answer.ready)

    def _wait_for(self, what: str) -> None:
        """Say once why it is not attached, and again when that changes."""
        if what != self._waiting_for:
            self._waiting_for = what
            logger.warning("waiting for engine %s: %s", self.endpoint, what)

    def _hello(self, info: EngineFacts) -> pb.Hello:
        return pb.Hello(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            client_id=self._identity.client_id,
            session_id=self._identity.session_id,
            client_version=__version__,
            expect_model=self._identity.expect_model,
            expect_tokenizer_sha256=self._tokenizers.expected_sha256(info.tokenizer_sha256),
        )

    def _become_ready(self, session: EngineSession, facts: EngineFacts) -> None:
        if self.facts is not None:
            self._stats.reconnected(facts.engine_id, is_new_boot=self.facts.boot != facts.boot)
        self.facts = facts
        self.load = EngineLoad()
        self.last_error = None
        self.engine_state = facts.state
        self._num_unanswered = self._num_unreported = 0
        self._session = session
        self._backoff_s = MIN_BACKOFF_S
        self._waiting_for = ""
        self._set_state(ConnectionState.READY)
        logger.info("engine %s at %s is ready: %s, boot %s", facts.engine_id, self.endpoint, facts.model, facts.boot_id)

    def _refusal(self, error: grpc.aio.AioRpcError) -> StepwireError:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            text = f"engine {self.endpoint} refuses this frontend: {error.details()}"
            return EngineRefusedError(text, reason=reason_of(error) or None)
        return UnavailableError(f"engine {self.endpoint} does not answer: {why_silent(error)}")

    def _lose(self, error: StepwireError) -> None:
        # A copy has no traceback, which would keep the session and all that it held.
        error = copy.copy(error)
        if isinstance(error, EngineRefusedError):
            self._backoff_s = MAX_BACKOFF_S
            self._listener.on_refused(error)
        if str(error) != str(self.last_error):
            logger.warning("engine %s: %s", self.engine_id, error)
        was_attached = self.state in (ConnectionState.READY, ConnectionState.DRAINING)
        self.last_error = error
        self.engine_state = EngineState.DEAD if isinstance(error, EngineDeadError) else EngineState.UNSPECIFIED
        self._set_state(ConnectionState.LOST)
        self._utility_calls.fail_all(error)
        if was_attached:
            self._listener.on_lost(self, error)

    async def _back_off(self) -> None:
        if self.state is ConnectionState.CLOSED:
            return
        # Spread out, so that many frontends do not come back to a new engine at the same moment.
        await asyncio.sleep(self._backoff_s * random.uniform(0.8, 1.2))
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def _set_state(self, state: ConnectionState) -> None:
        if self.state is not ConnectionState.CLOSED:
            self.state = state
        self._listener.on_state(self)

    # What the session reports.

    async def on_outputs(self, outputs: list[EngineOutput]) -> None:
        await self._listener.on_outputs(self, outputs)

    def on_load(self, load: EngineLoad) -> None:
        self.load = load
        # What the engine has not answered yet came after this snapshot.
        self._num_unreported = self._num_unanswered

    def on_weight_version(self, version: str) -> None:
        """The only fact of a Ready that changes within a boot; it is here before the first token that shows it.

        Empty = no news.
        """
        if self.facts is not None and version and version != self.facts.weight_version:
            logger.info("engine %s has the weights %s", self.engine_id, version)
            self.facts = replace(self.facts, weight_version=version)

    def on_engine_state(self, state: EngineState) -> None:
        if state is self.engine_state:
            return
        logger.info("engine %s is %s", self.engine_id, state.name)
        self.engine_state = state
        self._set_state(ConnectionState.DRAINING if state is EngineState.DRAINING else ConnectionState.READY)

    def on_utility_result(self, result: pb.UtilityResult) -> None:
        self._utility_calls.settle(result)

    def on_batch_gap(self, num_missing: int) -> None:
        logger.error("engine %s: %d batches of output are missing", self.engine_id, num_missing)
        self._listener.on_batch_gap(self, num_missing)
