"""One answer over several calls: what to ask for after a break, and what of the next call is new.

Knows neither channels nor loops; each client drives it. Owner: the task or thread that reads the answer.

After a break the tokens so far are sent along, with the seed of Accepted, and the server goes on behind them as if
nothing had happened. All but the last delta's: whether the answer had ended with it is what the break may have hidden.
These few tokens are generated again, compared, and not shown twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc

from stepwire_client import delta_overlap
from stepwire_client.call_facts import CallFacts
from stepwire_client.deadline import Deadline
from stepwire_client.errors import CallError

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
ABORT_TIMEOUT_S = 2.0

# Refusals that end a first call and not a resumed one: what was delivered is worth another try.
_WORTH_WAITING = frozenset({"QUEUE_FULL", "DUPLICATE_REQUEST"})

Request = TypeVar("Request")
Response = TypeVar("Response")


class DivergedError(Exception):
    """A server generated other tokens than were delivered; the next request holds on to the delivered ones."""


@dataclass(slots=True)
class _Stretch:
    """Output that was delivered since the tokens that a resumed call starts behind."""

    token_ids: list[int] = field(default_factory=list)
    # The prompt in front of the output, which is echoed when a call starts from nothing.
    num_echoed: int = 0
    num_chars: Counter[str] = field(default_factory=Counter)
    num_reasoning: int = 0

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_echoed :]


class ResumableStream(Generic[Request, Response]):
    """`request` for each call, `take` for each of its messages, `delay_after` for the error that ended it."""

    def __init__(self, request: Request, max_resumes: int, deadline: Deadline, facts: CallFacts | None = None) -> None:
        """`request` is a GenerateRequest or ChatRequest, and is not changed. Raises ValueError for n > 1."""
        self.deadline = deadline
        self._request: Any = _copy(request)
        if self._request.sampling.n > 1:
            raise ValueError(f"an answer of {self._request.sampling.n} choices can not be resumed, only one of 1")
        self._shows_token_ids = self._request.output.token_ids
        self._request.output.token_ids = True
        # Whatever happens to the stream from then on, the answer is whole.
        self.is_finished = False
        self._max_resumes = max_resumes
        self._num_resumes = 0
        self._facts = facts
        self._error: CallError | None = None
        self._accepted: Any = None
        self._num_given = 0
        # Output before the last stretch: what the next call starts behind.
        self._kept: list[int] = []
        self._num_kept_reasoning = 0
        # The same of the moment when this call began.
        self._num_resumed = 0
        self._num_resumed_reasoning = 0
        self._last = _Stretch()
        # What of the last stretch this call has yet to repeat.
        self._expected = _Stretch()
        self._known_calls: set[int] = set()
        self._may_echo = False

    def request(self) -> Request:
        """For the next call."""
        request = _copy(self._request)
        if self._kept:
            request.resume_output_token_ids.ids.extend(self._kept)
        if self._accepted is not None:
            request.request_id = self._accepted.request_id
            request.sampling.seed = self._accepted.seed
        self._num_resumed, self._num_resumed_reasoning = len(self._kept), self._num_kept_reasoning
        last = self._last
        self._expected = _Stretch(list(last.token_ids), last.num_echoed, Counter(last.num_chars))
        self._may_echo = request.output.echo_prompt and not request.resume_output_token_ids.ids
        answer: Request = request
        return answer

    def take(self, message: Response) -> Sequence[Response]:
        """What of a message is new to the caller: it, changed, or nothing. Raises DivergedError or CallError."""
        event: Any = message
        match event.WhichOneof("event"):
            case "accepted":
                is_new = self._take_accepted(event.accepted)
            case "delta":
                is_new = self._take_delta(event.delta)
            case "prompt":
                # It would come again with the next call.
                self._request.output.ClearField("prompt_logprobs")
                is_new = True
            case "finished":
                self._take_finished(event.finished)
                is_new = self.is_finished = True
            case _:
                # Of a newer server.
                is_new = True
        if not is_new:
            return ()
        event.index = self._num_given
        self._num_given += 1
        return (message,)

    def delay_after(self, error: CallError) -> float:
        """Seconds to wait before the next call. Raises the error when there should be none."""
        self._error = error
        delay_s = self._delay_s(error)
        if self._num_resumes >= self._max_resumes or not self._is_worth_it(error) or not self.deadline.allows(delay_s):
            raise self._told(error)
        self._num_resumes += 1
        if self._facts is not None:
            self._facts.num_resumes = self._num_resumes
        return delay_s

    @property
    def request_id_to_abort(self) -> str:
        """The request of a connection that broke may run on, and keep its id; empty = the server has ended it."""
        if self._error is None or self._error.reason not in ("", "DUPLICATE_REQUEST"):
            return ""
        request_id: str = (self._accepted or self._request).request_id
        return request_id

    @property
    def abort_timeout_s(self) -> float:
        remaining = self.deadline.remaining()
        return ABORT_TIMEOUT_S if remaining is None else min(ABORT_TIMEOUT_S, remaining)

    def _is_worth_it(self, error: CallError) -> bool:
        # Before Accepted nothing was begun that could go on: whether to ask at all is the caller's to say.
        if self._accepted is None or (error.details.pushback_ms or 0) < 0:
            return False
        if error.code is grpc.StatusCode.UNAVAILABLE or error.reason == "SLOW_CLIENT":
            return True
        return self._num_resumes > 0 and error.reason in _WORTH_WAITING

    def _delay_s(self, error: CallError) -> float:
        if error.details.pushback_ms is not None:
            return error.details.pushback_ms / 1000
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self._num_resumes)
        return error.details.retry_after_s or backoff_s

    def _told(self, error: CallError) -> CallError:
        """With the tokens of all calls, not of the last one alone."""
        if self._num_resumes:
            num_tokens = len(self._kept) + len(self._last.output_token_ids)
            error.details.metadata["tokens_emitted"] = str(num_tokens)
        return error

    def _take_accepted(self, accepted: Any) -> bool:
        first, self._accepted = self._accepted, self._accepted or _copy(accepted)
        if first is None:
            return True
        if (first.model, first.prompt_tokens) != (accepted.model, accepted.prompt_tokens) and self._error is not None:
            # Another model stands there now; its text would be no continuation.
            self._max_resumes = 0
            raise self._error
        return False

    def _take_delta(self, delta: Any) -> bool:
        # An echo that comes again is expected like everything else in its delta.
        may_echo, self._may_echo = self._may_echo and not self._expected.token_ids, False
        self._drop_expected(delta)
        delta_overlap.drop_known_calls(delta, self._known_calls)
        self._keep(delta, min(self._accepted.prompt_tokens, len(delta.token_ids)) if may_echo else 0)
        if not self._shows_token_ids:
            del delta.token_ids[:]
        return not delta_overlap.is_empty(delta)

    def _drop_expected(self, delta: Any) -> None:
        """Leave what is new in a delta."""
        expected = self._expected
        count = min(len(expected.token_ids), len(delta.token_ids))
        if list(delta.token_ids[:count]) != expected.token_ids[:count]:
            self._diverge()
        num_rows = min(len(expected.output_token_ids), len(delta.logprobs))
        del delta.logprobs[:num_rows]
        del delta.token_ids[:count]
        del expected.token_ids[:count]
        expected.num_echoed = max(0, expected.num_echoed - count)
        delta_overlap.cut(delta, expected.num_chars)

    def _keep(self, delta: Any, num_echoed: int) -> None:
        if delta.token_ids:
            self._close_stretch()
            self._last = _Stretch(list(delta.token_ids), num_echoed)
            self._last.num_reasoning = len(delta.token_ids) if getattr(delta, "reasoning", "") else 0
        self._last.num_chars += delta_overlap.lengths(delta)

    def _close_stretch(self) -> None:
        self._kept += self._last.output_token_ids
        self._num_kept_reasoning += self._last.num_reasoning
        self._last = _Stretch()

    def _diverge(self) -> None:
        self._close_stretch()
        raise DivergedError

    def _take_finished(self, finished: Any) -> None:
        if self._expected.token_ids or +self._expected.num_chars:
            # It ends before what was delivered does.
            self._diverge()
        if finished.HasField("usage"):
            usage = finished.usage
            usage.completion_tokens += self._num_resumed
            usage.reasoning_tokens += self._num_resumed_reasoning
            usage.cached_prompt_tokens = min(usage.cached_prompt_tokens, usage.prompt_tokens)


def _copy(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy
