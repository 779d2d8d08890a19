"""Thousands of random requests through EngineCoreProc around the fake executor, each followed to its only end.

Nothing of an ended request is kept but a count, so that what grows is the engine's. One thread is the busy loop and
the frontend in turns; with asynchronous scheduling the device thread runs beside it. Time is the test's.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from engine_core.messages import Add, OutputMessage
from engine_core.scheduler.output import EngineCoreOutputs, Finish, FinishReason
from engine_core.scheduler.request import Request, RequestKey, SamplingParams, StopConditions
from fakes.fake_executor import next_token
from fakes.looped_engine import SESSION, LoopedEngine

# Some of what the fake model says; one token in twenty.
STOP_TOKEN_IDS = frozenset(range(3, 403, 20))


@dataclass(frozen=True)
class StormShape:
    """How many requests are in the engine at once, and what they look like."""

    num_requests: int
    max_live: int
    # Of a beginning that a quarter of the requests share.
    max_shared_tokens: int = 0
    max_tokens: int = 4
    # Share of the turns in which one is aborted, and of the requests that have a deadline.
    abort_rate: float = 0.0
    deadline_rate: float = 0.0


@dataclass
class _Story:
    """What must come out, and what came out so far."""

    expected: list[int]
    reason: FinishReason
    token_ids: list[int] = field(default_factory=list)


class RequestStorm(LoopedEngine):
    """`blow` runs all requests; `ends` counts how they ended."""

    def __init__(self, shape: StormShape, seed: int, **settings: object) -> None:
        super().__init__(**{"async_scheduling": True, **settings})
        self.shape = shape
        self.ends: Counter[str] = Counter()
        self.num_preemptions = 0
        self.num_added = 0
        self.num_ended = 0
        self._rng = random.Random(seed)
        self._live: dict[int, _Story] = {}
        # The fake executor keeps what it was told, for tests that ask.
        self.executor.scheduler_outputs = deque(maxlen=1)  # type: ignore[assignment]
        self.executor.finished_keys = deque(maxlen=1)  # type: ignore[assignment]

    def blow(self, num_requests: int) -> None:
        """Until so many more have been added, or all of them; those that are in the engine stay there."""
        goal = min(self.num_added + num_requests, self.shape.num_requests)
        while self.num_added < goal:
            room = min(self.shape.max_live - len(self._live), goal - self.num_added)
            new = [self._request() for _ in range(self._rng.randint(0, room))]
            for request in new:
                assert self.proc.core.preprocess_add_request(request) is None
            self.proc.input_queue.put(Add(new))
            self._abort_one()
            self.now += self._rng.random()
            self.turn()

    def settle(self) -> None:
        """Run what is left to its end."""
        while self._live or self.proc.core.has_work:
            self.turn()

    def _request(self) -> Request:
        self.num_added += 1
        rng, shape = self._rng, self.shape
        family = rng.randrange(4)
        shared = [10 + family] * rng.randint(0, shape.max_shared_tokens)
        prompt = shared + [rng.randint(3, 402) for _ in range(rng.randint(1, 8))]
        stop = StopConditions(rng.randint(1, shape.max_tokens), stop_token_ids=STOP_TOKEN_IDS)
        self._live[self.num_added] = _Story(*_answer(prompt, stop))
        has_deadline = rng.random() < shape.deadline_rate
        return Request(
            key=_key(self.num_added),
            request_id=f"request-{self.num_added}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(),
            stop=stop,
            arrival_time=self.now,
            deadline=self.now + rng.uniform(1, 20) if has_deadline else None,
            queue_deadline=self.now + rng.uniform(0, 5) if has_deadline else None,
        )

    def _abort_one(self) -> None:
        """Once for sure and once again, next to one that is unknown or has ended."""
        if self._live and self._rng.random() < self.shape.abort_rate:
            one = _key(self._rng.choice(list(self._live)))
            self.proc.abort([one, _key(self._rng.randint(1, 10**6)), one], "requested")

    def _take(self, message: OutputMessage) -> None:
        if isinstance(message, EngineCoreOutputs):
            for output in message.outputs:
                story = self._live[output.key[1]]
                story.token_ids += output.new_token_ids
                if output.finish is not None:
                    del self._live[output.key[1]]
                    self._end(story, output.finish)

    def _end(self, story: _Story, finish: Finish) -> None:
        self.num_ended += 1
        self.num_preemptions += finish.num_preemptions
        self.ends[finish.reason.name if finish.error is None else finish.error.reason] += 1
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (story.token_ids, finish.reason) == (story.expected, story.reason)
        else:
            assert story.token_ids == story.expected[: len(story.token_ids)]


def _key(handle: int) -> RequestKey:
    return (SESSION, handle)


def _answer(prompt: list[int], stop: StopConditions) -> tuple[list[int], FinishReason]:
    """The tokens of a request that runs alone, and why it ends."""
    known = list(prompt)
    while len(known) < len(prompt) + stop.max_tokens:
        known.append(next_token(known))
        if known[-1] in stop.stop_token_ids:
            return known[len(prompt) :], FinishReason.STOP
    return known[len(prompt) :], FinishReason.LENGTH
