"""How far one request's output has come in its grammar.

Made by an input thread, completed by whoever compiled the grammar, and from then on used by the step loop alone: the
loop fills masks (maybe in several threads, one for each row) while nothing accepts tokens, and accepts tokens after.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import xgrammar

from engine_core.scheduler.request import RequestKey
from engine_core.scheduler.request_error import RequestError

logger = logging.getLogger(__name__)

_EVERYTHING = -1
NO_FIELDS: Mapping[str, str] = {}


class GrammarState:
    """Implements `Grammar`. `on_done` is called once, from any thread: it is ready, or it has an error."""

    def __init__(
        self,
        key: RequestKey,
        eos_token_ids: Sequence[int],
        resumed_token_ids: Sequence[int],
        on_done: Callable[[RequestKey], None],
        log_fields: Mapping[str, str] = NO_FIELDS,
    ) -> None:
        self._key = key
        self._eos_token_ids = list(eos_token_ids)
        self._resumed_token_ids = list(resumed_token_ids)
        self._on_done = on_done
        self._log_fields = log_fields
        self._matcher: xgrammar.GrammarMatcher | None = None
        self._error: RequestError | None = None
        self._is_broken = False

    @property
    def is_ready(self) -> bool:
        return self._matcher is not None

    @property
    def error(self) -> RequestError | None:
        return self._error

    @property
    def is_terminated(self) -> bool:
        return self._matcher is not None and self._matcher.is_terminated()

    # -- whoever compiled --------------------------------------------------------------------------------------------

    def complete(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        """Start at the beginning of the grammar and go over the resumed output."""
        # Without any end-of-sequence id nothing could say "the end": then the grammar's first end is the end.
        has_eos = bool(self._eos_token_ids)
        matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=self._eos_token_ids or None, terminate_without_stop_token=not has_eos
        )
        problem = self._problem(matcher, vocab_size)
        if problem is not None:
            self.fail(problem)
            return
        self._matcher = matcher
        self._on_done(self._key)

    def fail(self, problem: str) -> None:
        """What is wrong with the constraint."""
        self.end(RequestError("GRAMMAR_INVALID", problem))

    def end(self, error: RequestError) -> None:
        """It will never be ready."""
        self._error = error
        self._on_done(self._key)

    def _problem(self, matcher: xgrammar.GrammarMatcher, vocab_size: int) -> str | None:
        for index, token_id in enumerate(self._resumed_token_ids):
            if not matcher.accept_token(token_id):
                return f"the resumed output leaves the grammar at token {index}"
        if matcher.is_terminated():
            return (
                "there is nothing to generate: the grammar is at its end"
                if self._resumed_token_ids
                else ("the grammar allows the empty output only, and no end-of-sequence id is there to say it")
            )
        words = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        matcher.fill_next_token_bitmask(words, 0)
        return None if words.any() else "no output of this model satisfies the grammar"

    # -- the step loop -----------------------------------------------------------------------------------------------

    def accept(self, token_id: int) -> bool:
        if self._matcher is None or self._is_broken:
            return False
        try:
            return bool(self._matcher.accept_token(token_id))
        except RuntimeError:
            # The library's own check failed: this request ends, and no other.
            logger.exception("the grammar matcher failed", extra=self._log_fields)
            return False

    def fill(self, words: np.ndarray, row: int) -> None:
        """Set the bits of the tokens that may come next in row `row` of an int32 [R, W] array."""
        try:
            if self._matcher is not None:
                self._matcher.fill_next_token_bitmask(words, row)
        except RuntimeError:
            # As above: let any token through now, and refuse it then.
            logger.exception("the grammar matcher failed", extra=self._log_fields)
            self._is_broken = True
            words[row] = _EVERYTHING
