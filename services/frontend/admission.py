"""Refusing at the door: permits on choices and prompt tokens in flight. Never waits. Owner: the event loop.

A request takes one permit before it is tokenized and grows it when its size is known, so that overload is answered
at once and costs no tokenization. A caller holds at most its own share of the limits, and of the last of them no client
class takes more than its fair part (`fair_part.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from frontend.access.caller import Caller
from frontend.fair_part import Contenders, Held, kept_back
from frontend.retry_advice import RETRY_AFTER_MS
from stepwire.errors import InvalidRequestError, OverloadedError, QuotaViolation

NOBODY = Caller("")


class Admission:
    """The counters; one for each frontend."""

    def __init__(self, max_requests: int, max_prompt_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = Held(max_requests, max_prompt_tokens)
        self._kept_back = Held(kept_back(max_requests), kept_back(max_prompt_tokens))
        self._held = Held()
        self._held_by_token: dict[str, Held] = {}
        self._contenders = Contenders(clock)

    @property
    def num_requests(self) -> int:
        return self._held.num_requests

    @property
    def num_prompt_tokens(self) -> int:
        return self._held.num_prompt_tokens

    def name_classes(self, names: Iterable[str]) -> None:
        """Classes that the operator knows contend also while they ask for nothing."""
        self._contenders.named = frozenset(names)

    def enter(self, caller: Caller = NOBODY) -> Permit:
        """A permit for one choice of yet unknown size. Raises OverloadedError."""
        self._contenders.note(caller.client_class)
        permit = Permit(self, caller)
        permit.take(Held(1, 0))
        return permit

    def check(self, caller: Caller, own: Held, more: Held) -> None:
        """Raises OverloadedError when a request that holds its own already may not take so much more now."""
        self._check_share(caller, more)
        after = self._held + more
        if not after.fits(self._limits):
            raise OverloadedError(_passing(self._held, more, self._limits, "limit"), retry_after_ms=RETRY_AFTER_MS)
        if after.fits(self._limits - self._kept_back) or self._held == own:
            return
        fair_part = self._limits.divided_by(self._contenders.count(caller.client_class))
        if not (self._contenders.held_by(caller.client_class) + more).fits(fair_part):
            text = _passing(self._contenders.held_by(caller.client_class), more, fair_part, "fair part of its class")
            raise OverloadedError(f"nearly full: {text}", retry_after_ms=RETRY_AFTER_MS)

    def change(self, caller: Caller, more: Held) -> None:
        """Count what was taken or, negative, given back."""
        self._held += more
        self._contenders.change(caller.client_class, more)
        if caller.name:
            held = self._held_by_token.get(caller.name, Held()) + more
            if held == Held():
                del self._held_by_token[caller.name]
            else:
                self._held_by_token[caller.name] = held

    def check_possible(self, caller: Caller, num_choices: int, num_prompt_tokens: int) -> None:
        """What can never be admitted is the caller's to change; "try again later" would be a lie."""
        limits = self._limits.times(caller.share)
        if num_choices > limits.num_requests:
            raise InvalidRequestError.of_field(
                "sampling.n", f"{num_choices} choices are more than the {limits.num_requests} this server runs at once"
            )
        if num_choices * num_prompt_tokens > limits.num_prompt_tokens:
            raise InvalidRequestError.of_field(
                "sampling.n" if num_choices > 1 else "prompt",
                f"{num_choices} x {num_prompt_tokens} prompt tokens are more than the "
                f"{limits.num_prompt_tokens} this server holds at once",
            )

    def check_batch(self, caller: Caller, field: str, num_requests: int, num_choices: int) -> None:
        """As `check_possible`, for the requests that one call begins at once; `field` is what lists their prompts."""
        limit = self._limits.times(caller.share).num_requests
        if num_requests > 1 and num_requests * num_choices > limit:
            raise InvalidRequestError.of_field(
                field if num_choices <= limit else "sampling.n",
                f"{num_requests} x {num_choices} choices are more than the {limit} this server runs at once",
            )
        most = caller.most_at_once
        if most is not None and num_requests > most:
            raise InvalidRequestError.of_field(
                field, f"{num_requests} requests at once are more than the {most} a minute that this token has"
            )

    def _check_share(self, caller: Caller, more: Held) -> None:
        if caller.share >= 1:
            return
        limits = self._limits.times(caller.share)
        held = self._held_by_token.get(caller.name, Held())
        if not (held + more).fits(limits):
            text = _passing(held, more, limits, "share of this token")
            quota = (QuotaViolation(f"token:{caller.name}", text),)
            raise OverloadedError(text, reason="RATE_LIMITED", retry_after_ms=RETRY_AFTER_MS, quota=quota)


class Permit:
    """What one request holds. Released exactly once, however often `release` is called."""

    def __init__(self, admission: Admission, caller: Caller) -> None:
        self._admission = admission
        self._caller = caller
        self.held = Held()

    def take(self, more: Held) -> None:
        """Hold so much more. Raises OverloadedError, and holds on to what it has."""
        self._admission.check(self._caller, self.held, more)
        self._admission.change(self._caller, more)
        self.held += more

    def grow(self, num_choices: int, num_prompt_tokens: int) -> None:
        """The request turned out to be this large. Raises OverloadedError or InvalidRequestError, and holds on."""
        self._admission.check_possible(self._caller, num_choices, num_prompt_tokens)
        self.take(Held(num_choices, num_choices * num_prompt_tokens) - self.held)

    def release(self) -> None:
        """Give everything back."""
        self._admission.change(self._caller, Held() - self.held)
        self.held = Held()


def _passing(held: Held, more: Held, limits: Held, which: str) -> str:
    if held.num_requests + more.num_requests > limits.num_requests:
        what, now, added, limit = "requests", held.num_requests, more.num_requests, limits.num_requests
    else:
        what, now, added, limit = (
            "prompt tokens",
            held.num_prompt_tokens,
            more.num_prompt_tokens,
            limits.num_prompt_tokens,
        )
    return f"{now} {what} are in flight and {added} more would pass the {which} of {limit}"
