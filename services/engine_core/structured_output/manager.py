"""Structured output as EngineCore uses it: start grammars, learn which are done, fill the bitmask of a step.

`start` is called by input threads, `expire` by the monitor, the rest by the step loop. Never touches the scheduler.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterable

from engine_core.scheduler.grammar import GrammarSpec
from engine_core.scheduler.request import Request, RequestKey
from engine_core.structured_output.bitmask import BitmaskFiller, GrammarBitmask
from engine_core.structured_output.grammar_compiler import GrammarCompiler
from engine_core.structured_output.grammar_state import GrammarState
from engine_core.structured_output.vocabulary import Vocabulary
from stepwire.shared_histogram import SharedHistogram


class StructuredOutputManager:
    """Grammars of one engine. `wake_up` is called, by any thread, when a grammar is done; the loop may be idle."""

    def __init__(
        self, vocabulary: Vocabulary, *, timeout_s: float, cache_bytes: int, clock: Callable[[], float]
    ) -> None:
        # The other half is for the model.
        num_threads = max(1, (os.cpu_count() or 2) // 2)
        self._compiler = GrammarCompiler(
            vocabulary, num_threads=num_threads, timeout_s=timeout_s, cache_bytes=cache_bytes, clock=clock
        )
        self._filler = BitmaskFiller(len(vocabulary.tokens), num_threads)
        self._done: queue.SimpleQueue[RequestKey] = queue.SimpleQueue()
        self.wake_up: Callable[[], None] = _nobody_to_wake

    @property
    def num_pending(self) -> int:
        """Grammars that are queued or being compiled."""
        return self._compiler.num_pending

    @property
    def compile_times(self) -> dict[tuple[str, str], SharedHistogram]:
        """How long compiles took, by kind and outcome."""
        return self._compiler.times

    @property
    def has_done(self) -> bool:
        """`take_done` would return something."""
        return not self._done.empty()

    def start(self, request: Request, spec: GrammarSpec) -> None:
        """Give the request its grammar, and start the compile of it."""
        eos_token_ids = sorted(request.stop.eos_token_ids)
        state = GrammarState(
            request.key, eos_token_ids, request.output_token_ids, self._on_grammar_done, request.log_fields
        )
        request.grammar = state
        self._compiler.start(spec, state)

    def take_done(self) -> list[RequestKey]:
        """Requests whose grammar is ready or has failed since the last call; maybe of requests not queued yet."""
        keys = []
        while not self._done.empty():
            keys.append(self._done.get())
        return keys

    def fill_bitmask(self, requests: Iterable[Request]) -> GrammarBitmask | None:
        """A row for each of these requests; None for none."""
        rows = [(request.key, request.grammar) for request in requests if isinstance(request.grammar, GrammarState)]
        return self._filler.fill(rows) if rows else None

    def expire(self) -> None:
        """Fail the requests whose grammar takes too long to compile."""
        self._compiler.expire()

    def shutdown(self) -> None:
        self._compiler.shutdown()
        self._filler.shutdown()

    def _on_grammar_done(self, key: RequestKey) -> None:
        self._done.put(key)
        self.wake_up()


def _nobody_to_wake() -> None:
    """Who steps the core itself needs no waking."""
