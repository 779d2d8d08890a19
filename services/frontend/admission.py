"""Refusing at the door: permits on choices and prompt tokens in flight. Never waits. Owner: the event loop.

A request takes one permit before it is tokenized and grows it when its size is known, so that overload is answered
at once and costs no tokenization.
"""

from __future__ import annotations

from frontend.retry_advice import RETRY_AFTER_MS
from stepwire.errors import InvalidRequestError, OverloadedError


class Admission:
    """The counters; one for each frontend."""

    def __init__(self, max_requests: int, max_prompt_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_prompt_tokens = max_prompt_tokens
        self.num_requests = 0
        self.num_prompt_tokens = 0

    def enter(self) -> Permit:
        """A permit for one choice of yet unknown size. Raises OverloadedError."""
        permit = Permit(self)
        self._take(1, 0)
        permit.num_requests = 1
        return permit

    def _take(self, num_requests: int, num_prompt_tokens: int) -> None:
        if self.num_requests + num_requests > self._max_requests:
            raise OverloadedError(
                f"{self.num_requests} requests are in flight and {num_requests} more would pass the limit of "
                f"{self._max_requests}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        if self.num_prompt_tokens + num_prompt_tokens > self._max_prompt_tokens:
            raise OverloadedError(
                f"{self.num_prompt_tokens} prompt tokens are in flight and {num_prompt_tokens} more would pass the "
                f"limit of {self._max_prompt_tokens}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self.num_requests += num_requests
        self.num_prompt_tokens += num_prompt_tokens

    def _check_possible(self, num_choices: int, num_prompt_tokens: int) -> None:
        """What can never be admitted is the caller's to change; "try again later" would be a lie."""
        if num_choices > self._max_requests:
            raise InvalidRequestError.of_field(
                "sampling.n", f"{num_choices} choices are more than the {self._max_requests} this server runs at once"
            )
        if num_choices * num_prompt_tokens > self._max_prompt_tokens:
            raise InvalidRequestError.of_field(
                "sampling.n" if num_choices > 1 else "prompt",
                f"{num_choices} x {num_prompt_tokens} prompt tokens are more than the "
                f"{self._max_prompt_tokens} this server holds at once",
            )


class Permit:
    """What one request holds. Released exactly once, however often `release` is called."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.num_requests = 0
        self.num_prompt_tokens = 0

    def grow(self, num_choices: int, num_prompt_tokens: int) -> None:
        """The request turned out to be this large. Raises OverloadedError or InvalidRequestError, and holds on."""
        self._admission._check_possible(num_choices, num_prompt_tokens)
        more_requests = num_choices - self.num_requests
        more_tokens = num_choices * num_prompt_tokens - self.num_prompt_tokens
        self._admission._take(more_requests, more_tokens)
        self.num_requests += more_requests
        self.num_prompt_tokens += more_tokens

    def release(self) -> None:
        """Give everything back."""
        self._admission.num_requests -= self.num_requests
        self._admission.num_prompt_tokens -= self.num_prompt_tokens
        self.num_requests = 0
        self.num_prompt_tokens = 0
