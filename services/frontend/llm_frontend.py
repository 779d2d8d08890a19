"""Joins the halves: requests in through admission and input processor to an engine, outputs back to their handlers.

Owner: the event loop. Knows every request in flight; each leaves exactly once, through the `finally` of `generation`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from frontend.abort_kind import AbortKind
from frontend.access.caller import Caller
from frontend.access.gate import Gate
from frontend.admission import Admission, Permit
from frontend.config import FrontendSettings
from frontend.engine_client.balancer import PickReason
from frontend.engine_client.connection_state import ClientIdentity, EngineRefusedError
from frontend.engine_client.engine_facts import EngineFacts
from frontend.engine_client.pool import EnginePool
from frontend.engine_client.tokenizer_store import TokenizerStore
from frontend.engine_outputs import EngineOutput
from frontend.generation import ClientGoneError, Generation
from frontend.metrics import FrontendMetrics
from frontend.peers import Peers
from frontend.request_errors import (
    as_stepwire_error,
    draining_error,
    duplicate_error,
    finished_reason_of,
    slow_client_error,
    with_facts,
)
from frontend.serving_model import ServingModel
from stepwire.errors import EngineDeadError, OverloadedError, StepwireError
from stepwire.log import about_request

logger = logging.getLogger(__name__)


class LLMFrontend:
    """`start`, then `generation` for each request, then `close`."""

    def __init__(
        self,
        settings: FrontendSettings,
        identity: ClientIdentity,
        metrics: FrontendMetrics,
        on_change: Callable[[], None],
        peers: Peers,
    ) -> None:
        self.instance_id = identity.session_id
        self.settings = settings
        self.metrics = metrics
        self.is_draining = False
        self.gate = Gate(settings.token_file, num_parts=settings.workers)
        self._peers = peers
        # None until the first engine has been attached.
        self._model: ServingModel | None = None
        self._on_change = on_change
        self._admission = Admission(settings.max_concurrent_requests, settings.max_concurrent_prompt_tokens)
        self._name_classes()
        self._in_flight: dict[tuple[str, str], Generation] = {}
        self._became_idle = asyncio.Event()
        self._became_idle.set()
        own_tokenizer = Path(settings.tokenizer) if settings.tokenizer else None
        self.pool = EnginePool(
            settings.endpoints,
            identity,
            TokenizerStore(settings.cache_dir, own_tokenizer),
            self,
            ready_timeout_s=settings.ready_timeout_s,
            stats=metrics.transport,
        )
        metrics.tell_config(
            settings.max_concurrent_requests, settings.max_concurrent_prompt_tokens, settings.tokenizer_threads
        )
        metrics.watch_gate(self.gate.failures.copy)
        if settings.metrics_mirror_engines:
            metrics.mirror_engines(lambda: self.pool.connections)
        metrics.watch_map("in_flight", lambda: len(self._in_flight))
        metrics.watch_map("engine_routes", lambda: self.pool.num_routes)
        metrics.watch_map("output_choices", self._num_choices)

    def start(self) -> None:
        """Begin to connect to the engines; requests are refused with ENGINE_STARTING until one is ready."""
        self.pool.start()

    async def close(self) -> None:
        """Say Goodbye to the engines. Requests must have ended."""
        await self.pool.close("shutdown")
        if self._model is not None:
            self._model.close()

    @property
    def is_serving(self) -> bool:
        """A new request would be taken now, as far as engines go."""
        return self.pool.is_available and not self.is_draining

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def model(self) -> ServingModel:
        """Raises UnavailableError as long as no engine has said which one it is."""
        if self._model is None:
            raise self.pool.unavailable_error()
        return self._model

    @asynccontextmanager
    async def generation(
        self, request_id: str, *, caller: str, deadline_in_s: float | None, client_class: str = ""
    ) -> AsyncIterator[Generation]:
        """The life of one request; `caller` is its Authorization header, `client_class` what it claims.

        Every error leaves it as a StepwireError with request_id, engine_id, tokens_emitted. Nothing is awaited on the
        way out: a cancelled handler has no time for that.
        """
        generation: Generation | None = None
        # Whoever is not let in has no class.
        class_metrics = self.metrics.client_classes.of("")
        kind, finished_reason = AbortKind.FRONTEND_ERROR, "error"
        try:
            known = self.gate.identify(caller, client_class)
            class_metrics = self.metrics.client_classes.of(known.client_class)
            generation = self._enter(request_id, known, deadline_in_s)
            class_metrics.in_flight.inc()
            async with generation.time_limit:
                await self._claim(generation)
                with about_request(request_id):
                    yield generation
        except (asyncio.CancelledError, ClientGoneError):
            kind, finished_reason = AbortKind.CLIENT_CANCELLED, "abort"
            raise
        except Exception as caught:
            if generation is not None and isinstance(caught, TimeoutError) and generation.time_limit.expired():
                kind, error = generation.cut_kind, generation.cut_error
            else:
                error = as_stepwire_error(caught, request_id)
            finished_reason = finished_reason_of(error, is_admitted=generation is not None and generation.is_admitted)
            if finished_reason == "rejected":
                class_metrics.rejected[error.reason].inc()
            if generation is not None:
                generation.trace.fail(error)
            raise with_facts(error, request_id, generation) from caught
        finally:
            if generation is not None:
                class_metrics.in_flight.dec()
                self._leave(generation, kind, finished_reason)

    @contextmanager
    def tokenization(self, caller: str = "", client_class: str = "") -> Iterator[ServingModel]:
        """The model, for a call that needs no engine; it takes a permit too, and counts as a request of its caller.

        Raises UnavailableError, OverloadedError, AccessError. Nothing waits for such a call when this frontend drains:
        it is over soon.
        """
        if self.is_draining:
            raise draining_error()
        permit = self._admit(self.gate.identify(caller, client_class))
        try:
            yield self.model
        finally:
            permit.release()

    def check_batch(self, caller: str, client_class: str, field: str, num_requests: int, num_choices: int = 1) -> None:
        """Before one call begins several requests. Raises InvalidRequestError when so many can never run."""
        self._admission.check_batch(self.gate.identify(caller, client_class), field, num_requests, num_choices)

    def _admit(self, caller: Caller) -> Permit:
        """The order matters: what is refused for lack of room has used nothing of a rate."""
        caller.check_model(self.model.facts.model)
        permit = self._admission.enter(caller)
        try:
            if caller.use is not None:
                caller.use.take_request()
        except OverloadedError:
            permit.release()
            raise
        return permit

    def _enter(self, request_id: str, caller: Caller, deadline_in_s: float | None) -> Generation:
        if self.is_draining:
            raise draining_error()
        if not self.pool.is_available:
            raise self.pool.unavailable_error()
        key = (caller.key, request_id)
        other = self._in_flight.get(key)
        if other is not None:
            raise duplicate_error(request_id, other.tokens_emitted)
        permit = self._admit(caller)
        generation = Generation(
            request_id,
            caller,
            self.model,
            permit,
            self.pool,
            self.metrics.of_model,
            deadline_in_s,
            self.settings.slow_client_timeout_s,
        )
        self._in_flight[key] = generation
        self._became_idle.clear()
        return generation

    async def _claim(self, generation: Generation) -> None:
        """The same id may be in flight in another process."""
        tokens_emitted = await self._peers.claim(generation.caller.key, generation.request_id)
        if tokens_emitted is not None:
            raise duplicate_error(generation.request_id, tokens_emitted)

    def _leave(self, generation: Generation, kind: AbortKind, finished_reason: str) -> None:
        del self._in_flight[generation.caller.key, generation.request_id]
        self._peers.release(generation.caller.key, generation.request_id)
        if not self._in_flight:
            self._became_idle.set()
        live = generation.close(finished_reason)
        if live:
            self._abort(live, kind)

    def _abort(self, handles: list[int], kind: AbortKind) -> None:
        self.metrics.requests_aborted[kind].inc(len(handles))
        self.pool.abort(handles, kind)

    # Control.

    async def abort(self, caller: str, request_ids: Iterable[str]) -> tuple[list[str], list[str]]:
        """Abort requests of this caller, in whichever process; returns the ids that were live, and the others."""
        ids = list(dict.fromkeys(request_ids))
        key = self.gate.identify(caller).key
        live = set(self.abort_here(key, ids))
        if elsewhere := [request_id for request_id in ids if request_id not in live]:
            live |= await self._peers.abort(key, elsewhere)
        return [one for one in ids if one in live], [one for one in ids if one not in live]

    def abort_here(self, key: str, request_ids: Iterable[str]) -> list[str]:
        """Of those in flight in this process; `key` is the namespace of the caller's ids. Returns the live ones."""
        found = {one: self._in_flight[key, one] for one in request_ids if (key, one) in self._in_flight}
        for generation in found.values():
            generation.abort()
        return list(found)

    def tokens_emitted(self, key: str, request_id: str) -> int | None:
        """Of a request in flight in this process."""
        generation = self._in_flight.get((key, request_id))
        return None if generation is None else generation.tokens_emitted

    def begin_drain(self) -> None:
        """Refuse new requests; those in flight go on."""
        self.is_draining = True
        self._on_change()

    async def wait_idle(self) -> None:
        """Return when no request is in flight."""
        await self._became_idle.wait()

    def cut_all(self) -> None:
        """The drain time is over: every request ends with UNAVAILABLE and what it has delivered."""
        for generation in list(self._in_flight.values()):
            generation.cut(draining_error(), AbortKind.SHUTDOWN)

    def refresh_tokens(self) -> None:
        """Look whether the token file has changed; called regularly."""
        self.gate.refresh()
        self._name_classes()

    def _name_classes(self) -> None:
        self._admission.name_classes(self.gate.client_classes)
        self.metrics.client_classes.name(self.gate.client_classes)

    def cut_slow_clients(self) -> None:
        """End the streams whose clients do not read; called regularly."""
        if self._model is None:
            return
        slow = set(
            self._model.output_processor.find_slow(
                max_unread_bytes=self.settings.slow_client_bytes, max_unread_s=self.settings.slow_client_timeout_s
            )
        )
        for generation in [one for one in self._in_flight.values() if one.collector in slow]:
            self.metrics.slow_client_cuts.inc()
            generation.cut(slow_client_error(self.settings), AbortKind.SLOW_CLIENT)

    # What the pool reports.

    async def on_attach(self, facts: EngineFacts, tokenizer_dir: Path) -> None:
        if self._model is not None and self._model.is_same(facts):
            self._model.update(facts)
        else:
            await self._load_model(facts, tokenizer_dir)
        self.metrics.engine_attached(facts.engine_id)
        self.metrics.of_model(facts.model, facts.engine_id)

    def on_limits(self, facts: EngineFacts) -> None:
        if self._model is not None and self._model.is_same(facts):
            self._model.update(facts)

    def on_picked(self, reason: PickReason) -> None:
        self.metrics.picks[reason].inc()

    async def _load_model(self, facts: EngineFacts, tokenizer_dir: Path) -> None:
        try:
            model = await ServingModel.load(
                facts,
                tokenizer_dir,
                self._abort,
                self.metrics.count_output_failure,
                self.settings.tokenizer_threads,
                self.settings.chat_options,
                self.metrics.text_times,
            )
        except ValueError as error:
            text = f"the tokenizer of engine {facts.engine_id} is unusable: {error}"
            raise EngineRefusedError(text, reason="TOKENIZER_UNUSABLE") from error
        if self._model is not None:
            self._model.close()
        self._model = model

    async def on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        await self.model.output_processor.process_outputs(outputs)

    def on_failed(self, handles: list[int], error: StepwireError) -> None:
        self.model.output_processor.fail(handles, error)

    def on_change(self) -> None:
        known = [connection for connection in self.pool.connections if connection.facts is not None]
        up = {connection.engine_id for connection in known if connection.is_available}
        self.metrics.set_engines_up({connection.engine_id: connection.engine_id in up for connection in known})
        self._on_change()

    def on_engine_lost(self, engine_id: str, error: StepwireError) -> None:
        if isinstance(error, EngineDeadError):
            self.metrics.count_engine_death(engine_id, error.kind, error.cause)

    def on_engine_refused(self, error: EngineRefusedError) -> None:
        self.metrics.count_engine_refusal(error.reason)

    def on_batch_gap(self, engine_id: str, num_missing: int) -> None:
        self.metrics.count_batch_gap(engine_id, num_missing)

    def _num_choices(self) -> int:
        return self._model.output_processor.num_choices if self._model is not None else 0
