"""A grammar that a test compiles by hand: it allows what the test says, and remembers what it accepted."""

from __future__ import annotations

from collections.abc import Container

from engine_core.scheduler.request_error import RequestError


class ScriptedGrammar:
    """Implements `Grammar`. Accepts `allowed` (None = every token) and ends with `end`."""

    def __init__(
        self, *, is_ready: bool = False, allowed: Container[int] | None = None, end: int | None = None
    ) -> None:
        self.is_ready = is_ready
        self.error: RequestError | None = None
        self.accepted: list[int] = []
        self._allowed = allowed
        self._end = end

    @property
    def is_terminated(self) -> bool:
        return self._end is not None and self._end in self.accepted

    def accept(self, token_id: int) -> bool:
        if self._allowed is not None and token_id not in self._allowed:
            return False
        self.accepted.append(token_id)
        return True
