"""Compiles grammars beside the step loop: equal ones once, in a few threads, each within a time limit.

Entered by input threads (`start`), by the compile threads, and by the monitor (`expire`); hence the lock. Calls back
outside of it. The time limit counts from when a thread takes the grammar up: whoever queues behind another's grammar
is not blamed for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import xgrammar

from engine_core.scheduler.grammar import GRAMMAR_KINDS, GrammarSpec
from engine_core.scheduler.request_error import RequestError
from engine_core.structured_output.backends import Backends
from engine_core.structured_output.compile_threads import CompileThreads
from engine_core.structured_output.grammar_cache import GrammarCache
from engine_core.structured_output.grammar_state import GrammarState
from engine_core.structured_output.grammar_text import GrammarError, compile_spec
from engine_core.structured_output.vocabulary import Vocabulary
from stepwire.metrics import WIDE_BUCKETS
from stepwire.shared_histogram import SharedHistogram

COMPILE_OUTCOMES = ("ok", "invalid", "timeout")
_NO_THREAD = RequestError(
    "QUEUE_FULL",
    "grammars of other requests take all threads that compile them; try again later, or without structured output",
    retryable=True,
    retry_after_ms=10_000,
)
CompileSpec = Callable[[xgrammar.GrammarCompiler, GrammarSpec], xgrammar.CompiledGrammar]


@dataclass(slots=True, eq=False)
class _Compile:
    """One grammar that is queued or being compiled, and the requests that wait for it."""

    spec: GrammarSpec
    queued: float
    waiting: list[GrammarState] = field(default_factory=list)
    started: float | None = None
    # Set when its time is over; it is still being compiled.
    overrun: str | None = None
    is_written_off: bool = False
    # Taken out of the queue before its turn.
    is_dropped: bool = False


class GrammarCompiler:
    """Grammars for one vocabulary."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        num_threads: int,
        timeout_s: float,
        cache_bytes: int,
        clock: Callable[[], float],
        compile_one: CompileSpec = compile_spec,
    ) -> None:
        self._vocab_size = len(vocabulary.tokens)
        self._vocabulary_sha256 = vocabulary.sha256
        self._backends = Backends(vocabulary)
        self._compile_one = compile_one
        self._timeout_s = timeout_s
        self._clock = clock
        self._threads = CompileThreads(num_threads)
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._cache = GrammarCache(cache_bytes)
        self._compiles: dict[GrammarSpec, _Compile] = {}
        # Of compiles that have ended, by kind and outcome.
        self.times = {
            (kind, outcome): SharedHistogram(WIDE_BUCKETS) for kind in GRAMMAR_KINDS for outcome in COMPILE_OUTCOMES
        }

    @property
    def num_pending(self) -> int:
        """Grammars that are queued or being compiled."""
        return len(self._compiles)

    def start(self, spec: GrammarSpec, state: GrammarState) -> None:
        """Complete the state: at once when the grammar is cached, else when it is compiled or has failed."""
        overrun: str | None = None
        with self._lock:
            compiled = self._cache.get((spec, self._vocabulary_sha256))
            if compiled is None:
                overrun = self._wait(spec, state)
        if compiled is not None:
            state.complete(compiled, self._vocab_size)
        elif overrun is not None:
            state.fail(overrun)

    def _wait(self, spec: GrammarSpec, state: GrammarState) -> str | None:
        """Join the compile of this grammar, or begin one. Its error when it is known to take too long."""
        pending = self._compiles.get(spec)
        if pending is None:
            pending = self._compiles[spec] = _Compile(spec, self._clock())
            self._threads.submit(partial(self._run, pending))
        if pending.overrun is None:
            pending.waiting.append(state)
        return pending.overrun

    def expire(self) -> None:
        """Fail whoever waits for a compile that takes too long, or for a thread that such compiles have all taken."""
        failed: list[tuple[GrammarState, str]] = []
        with self._lock:
            now = self._clock()
            for pending in self._compiles.values():
                if pending.overrun is None and pending.started is not None and now - pending.started > self._timeout_s:
                    pending.overrun = f"{pending.spec.kind} does not compile within {self._timeout_s:g} s"
                    failed += [(state, pending.overrun) for state in pending.waiting]
                    pending.waiting = []
                    pending.is_written_off = self._threads.write_off()
            starved = self._drop_starved(now)
        for state, error in failed:
            state.fail(error)
        for state in starved:
            state.end(_NO_THREAD)

    def _drop_starved(self, now: float) -> list[GrammarState]:
        lost = sum(one.overrun is not None and not one.is_written_off for one in self._compiles.values())
        if lost < self._num_threads:
            return []
        starved = [one for one in self._compiles.values() if one.started is None and now - one.queued > self._timeout_s]
        for pending in starved:
            pending.is_dropped = True
            del self._compiles[pending.spec]
        return [state for pending in starved for state in pending.waiting]

    def shutdown(self) -> None:
        """What is queued is dropped with its requests; what is being compiled is not waited for."""
        self._threads.shutdown()

    # -- compile threads ---------------------------------------------------------------------------------------------

    def _run(self, pending: _Compile) -> None:
        with self._lock:
            if pending.is_dropped:
                return
            pending.started = self._clock()
        compiled, error = self._try(pending.spec)
        with self._lock:
            del self._compiles[pending.spec]
            if compiled is not None:
                self._cache.put((pending.spec, self._vocabulary_sha256), compiled)
            waiting, is_written_off = pending.waiting, pending.is_written_off
        self._note_time(pending, is_ok=compiled is not None)
        if is_written_off:
            self._threads.come_back()
        for state in waiting:
            self._complete(state, compiled, error)

    def _note_time(self, pending: _Compile, *, is_ok: bool) -> None:
        outcome = "timeout" if pending.overrun is not None else "ok" if is_ok else "invalid"
        times = self.times.setdefault((pending.spec.kind, outcome), SharedHistogram(WIDE_BUCKETS))
        times.observe(0.0 if pending.started is None else self._clock() - pending.started)

    def _try(self, spec: GrammarSpec) -> tuple[xgrammar.CompiledGrammar | None, str]:
        try:
            return self._compile_one(self._backends.backend_for(spec), spec), ""
        except GrammarError as error:
            return None, str(error)
        # Whatever it is, it is about this grammar, which its text may quote: its requests end, and the thread lives.
        except Exception as error:
            return None, f"{spec.kind} does not compile: {type(error).__name__}"

    def _complete(self, state: GrammarState, compiled: xgrammar.CompiledGrammar | None, error: str) -> None:
        if compiled is None:
            state.fail(error)
            return
        try:
            state.complete(compiled, self._vocab_size)
        except Exception as failure:
            state.fail(f"the grammar can not be used: {type(failure).__name__}")
