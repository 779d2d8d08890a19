"""Somebody at the door: who it is, of which class, and what it may still use. Owner: the event loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from frontend.access.rate import RateLimit
from frontend.access.token_file import Grant
from stepwire.errors import AccessError, OverloadedError, QuotaViolation


class GrantUse:
    """A grant and what was used of it. Lives as long as its rates do not change, whatever else the file says.

    Of `num_parts` workers each lets an equal part of the rates through.
    """

    def __init__(self, grant: Grant, clock: Callable[[], float], num_parts: int = 1) -> None:
        self.grant = grant
        self._clock = clock
        self._num_parts = num_parts
        self._requests = self._rate(grant.requests_per_minute)
        self._tokens = self._rate(grant.tokens_per_minute)

    def changed_to(self, grant: Grant) -> GrantUse:
        """For a file that was read again: a rate that stays keeps its count."""
        use = GrantUse(grant, self._clock, self._num_parts)
        if grant.requests_per_minute == self.grant.requests_per_minute:
            use._requests = self._requests
        if grant.tokens_per_minute == self.grant.tokens_per_minute:
            use._tokens = self._tokens
        return use

    def take_request(self) -> None:
        """One request, unless the rates are used up: raises OverloadedError RATE_LIMITED."""
        self._check(self._requests, 1, "requests")
        # Of a size yet unknown: enough to refuse a caller in debt before its prompt is tokenized.
        self._check(self._tokens, 1, "tokens")
        if self._requests is not None:
            self._requests.take(1)

    @property
    def most_at_once(self) -> int | None:
        """More requests never begin together, however long the caller waits; None without a rate."""
        return max(1, int(self._requests.per_minute)) if self._requests is not None else None

    def take_prompt(self, num_tokens: int) -> None:
        """The prompts of a request. Raises OverloadedError RATE_LIMITED."""
        self._check(self._tokens, num_tokens, "tokens")
        self.count_tokens(num_tokens)

    def count_tokens(self, num_tokens: int) -> None:
        """What was generated."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def _rate(self, per_minute: int | None) -> RateLimit | None:
        return RateLimit(per_minute / self._num_parts, self._clock) if per_minute is not None else None

    def _check(self, rate: RateLimit | None, amount: int, what: str) -> None:
        wait_s = rate.wait_s(amount) if rate is not None else 0.0
        if rate is None or not wait_s:
            return
        text = f"{rate.per_minute:g} {what} a minute are used up"
        if self._num_parts > 1:
            text += f" at this worker, one of {self._num_parts}"
        raise OverloadedError(
            text,
            reason="RATE_LIMITED",
            retry_after_ms=math.ceil(1000 * wait_s),
            quota=(QuotaViolation(f"token:{self.grant.name}", text),),
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """Of one request. Without a token file nobody has limits of its own."""

    # The namespace of its request ids.
    key: str
    client_class: str = ""
    use: GrantUse | None = None

    @property
    def name(self) -> str:
        """The name of its token; empty without."""
        return self.use.grant.name if self.use else ""

    @property
    def share(self) -> float:
        """The most of the frontend's limits that it may hold."""
        return self.use.grant.share if self.use else 1.0

    @property
    def most_at_once(self) -> int | None:
        """The most requests that may begin together; None = no limit but the frontend's."""
        return self.use.most_at_once if self.use else None

    def check_model(self, model: str) -> None:
        """Raises AccessError PERMISSION_DENIED."""
        models = self.use.grant.models if self.use else ()
        if models and model not in models:
            raise AccessError(f"token {self.name!r} may not use the model {model!r}", reason="PERMISSION_DENIED")
