"""The scheduler under random requests, aborts, deadlines and steps, some of them in flight, checked from outside.

A ShadowWorker sees only what a worker sees and verifies every table and every context; `sequence_oracle` says what each
request must produce. Everything else is the list of invariants of engine-semantics.md.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.scheduler.output import EngineCoreOutput, Finish, FinishReason, SchedulerOutput
from engine_core.scheduler.pause_state import PauseState
from engine_core.scheduler.pooling import PoolingParams, PoolingType
from engine_core.scheduler.request import (
    NO_LOGPROBS,
    LogprobsParams,
    Request,
    RequestKey,
    RequestStatus,
    StopConditions,
)
from engine_core.scheduler.scheduler import Scheduler
from engine_core.scheduler.scheduling_policy import SchedulingPolicy
from fakes.fake_logprobs import fake_rows
from fakes.kv_event_listener import KVEventListener
from fakes.request_factory import make_request, make_scheduler
from fakes.sequence_oracle import Answer, generate, next_token
from fakes.shadow_worker import ShadowWorker
from stepwire.packed_logprobs import PackedLogprobs

# By profile, see conftest.py.
EXAMPLES = settings.default.max_examples
MAX_MODEL_LEN = 24


@dataclass
class Story:
    """What was asked, what must come out, and what came out so far."""

    request: Request
    answer: Answer
    num_resumed: int
    new_token_ids: list[int] = field(default_factory=list)
    logprobs: list[PackedLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PackedLogprobs] = field(default_factory=list)
    pooled: bytes | None = None
    finish: Finish | None = None
    was_scheduled: bool = False


@dataclass(frozen=True)
class Flight:
    """A step that was planned and whose results are not in."""

    step: SchedulerOutput
    # Blocks it writes, and those it reads, by request.
    written: dict[RequestKey, set[int]]
    used: dict[RequestKey, set[int]]


# Made once: to make a strategy takes longer than to draw from it.
_MOSTLY = st.sampled_from([True, True, True, False])
_EITHER = st.booleans()
_NUM_SEQS = st.sampled_from([1, 2, 3, 4, 4])
_BLOCK_SIZES = st.sampled_from([1, 2, 3, 4])
_DATA_TOKENS = st.integers(16, 40)
_WINDOWS = st.sampled_from([(None,)] * 4) | st.lists(st.none() | st.integers(1, 8), min_size=1, max_size=3)
_SPARE_TOKENS = st.integers(0, 10)
_THRESHOLDS = st.integers(0, 4)
_WATERMARKS = st.sampled_from([0.0, 0.0, 0.3])
_QUEUED_REQUESTS = st.sampled_from([3, 50, 50, 50])
_QUEUED_TOKENS = st.sampled_from([40, 999, 999, 999])
_PREFILL_TOKENS = st.sampled_from([0, 1, 2, 3, 5])
_PARTIAL_PREFILLS = st.sampled_from([0, 1, 2])
_POLICIES = st.sampled_from(["fair", "fcfs", "priority"])
_CLASS_WEIGHTS = st.sampled_from([{}, {"gold": 3}, {"gold": 2, "*": 5}])
_BEST_PRIORITIES = st.sampled_from([{}, {"free": 1}])


@st.composite
def limits(draw: st.DrawFn) -> dict[str, object]:
    """Arguments of make_scheduler: mostly too small for comfort."""
    max_num_seqs = draw(_NUM_SEQS)
    block_size = draw(_BLOCK_SIZES)
    # From one long request to a few: preemption is the rule, refusal the exception.
    num_data_blocks = draw(_DATA_TOKENS) // block_size
    is_chunked = draw(_MOSTLY)
    smallest_budget = max_num_seqs if is_chunked else MAX_MODEL_LEN
    windows = draw(_WINDOWS)
    return {
        "num_blocks": len(windows) * num_data_blocks + 1,
        "block_size": block_size,
        "enable_caching": draw(_MOSTLY),
        "verify_hits": draw(_EITHER),
        "windows": windows,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": smallest_budget + draw(_SPARE_TOKENS),
        "enable_chunked_prefill": is_chunked,
        "long_prefill_token_threshold": draw(_THRESHOLDS) if is_chunked else 0,
        "reserve_full_prompt": draw(_MOSTLY),
        "watermark": draw(_WATERMARKS),
        "max_model_len": MAX_MODEL_LEN,
        "max_queued_requests": draw(_QUEUED_REQUESTS),
        "max_queued_tokens": draw(_QUEUED_TOKENS),
        "prefill_tokens_beside_decodes": draw(_PREFILL_TOKENS),
        "max_num_partial_prefills": draw(_PARTIAL_PREFILLS) if is_chunked else 0,
        "scheduling_policy": draw(_POLICIES),
        "class_weights": draw(_CLASS_WEIGHTS),
        "best_priorities": draw(_BEST_PRIORITIES),
    }


@dataclass(frozen=True)
class Ask:
    """What a caller asks for; times are from now."""

    prompt: list[int]
    seed: int
    stop: StopConditions
    cache_salt: str
    bypass_prefix_cache: bool
    is_resume: bool
    logprobs: LogprobsParams
    pooling: PoolingType | None
    deadline_in: int | None
    queue_deadline_in: int | None
    priority: int
    client_class: str
    age: int


_FAMILIES = st.integers(0, 1)
_SHARED_LENGTHS = st.integers(0, 12)
_TAILS = [st.lists(st.integers(0, 2), min_size=min_size, max_size=4) for min_size in (0, 1)]
_MAX_TOKENS = st.sampled_from([1, 3, 9, MAX_MODEL_LEN])
# Of those that were asked for.
_MIN_SHARES = st.sampled_from([0.0, 0.5, 1.0])
_STOP_TOKEN_IDS = st.sampled_from([frozenset(), frozenset({1})])
_DEADLINES = st.sampled_from([(None, None)] * 6 + [(1, None), (9, None), (None, 2), (None, 4), (6, 6)])
_SEEDS = st.integers(0, 3)
_CACHE_SALTS = st.sampled_from(["", "", "", "tenant"])
_RARELY = st.sampled_from([False, False, False, True])
_SOMETIMES = st.sampled_from([False, False, True])
_POOLINGS = st.sampled_from([None] * 6 + list(PoolingType))
_LOGPROBS = st.sampled_from([NO_LOGPROBS, NO_LOGPROBS, LogprobsParams(1, 0), LogprobsParams(None, 1)])
_PRIORITIES = st.sampled_from([0, 0, 0, 1, -1])
_CLIENT_CLASSES = st.sampled_from(["", "gold", "free"])
_AGES = st.sampled_from([0, 0, 0, 2])


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts of two families with long common beginnings, and short random tails."""
    family = draw(_FAMILIES)
    shared = [100 * family + index for index in range(draw(_SHARED_LENGTHS))]
    return shared + draw(_TAILS[not shared])


_PROMPTS = prompts()


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """Within the wire's contract: prompt and max_tokens fit max_model_len, min_tokens is at most max_tokens."""
    prompt = draw(_PROMPTS)
    max_tokens = min(draw(_MAX_TOKENS), MAX_MODEL_LEN - len(prompt))
    stop = StopConditions(
        max_tokens=max_tokens,
        min_tokens=int(max_tokens * draw(_MIN_SHARES)),
        eos_token_ids=frozenset({0}),
        stop_token_ids=draw(_STOP_TOKEN_IDS),
        ignore_eos=draw(_EITHER),
    )
    deadline_in, queue_deadline_in = draw(_DEADLINES)
    return Ask(
        prompt=prompt,
        seed=draw(_SEEDS),
        stop=stop,
        cache_salt=draw(_CACHE_SALTS),
        bypass_prefix_cache=draw(_RARELY),
        is_resume=draw(_SOMETIMES),
        pooling=draw(_POOLINGS),
        logprobs=draw(_LOGPROBS),
        deadline_in=deadline_in,
        queue_deadline_in=queue_deadline_in,
        priority=draw(_PRIORITIES),
        client_class=draw(_CLIENT_CLASSES),
        age=draw(_AGES),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, passes time and steps; checks everything after each move."""

    scheduler: Scheduler

    @initialize(
        arguments=limits(),
        first=st.lists(asks(), min_size=1, max_size=6),
        max_in_flight=st.sampled_from([1, 2, 2, 3]),
    )
    def start(self, arguments: dict[str, object], first: list[Ask], max_in_flight: int) -> None:
        self.scheduler = make_scheduler(**arguments)
        self.layout = self.scheduler.kv_cache_manager.layout
        self.block_size = self.layout.block_size
        self.scheduler.kv_cache_manager.pool.collect_events()
        self.listener = KVEventListener()
        self.worker = ShadowWorker(self.layout, next_token, lambda key: self.stories[key].request.cache_salt)
        self.stories: dict[RequestKey, Story] = {}
        self.now = 0.0
        self.max_in_flight = max_in_flight
        self.flights: deque[Flight] = deque()
        # Requests that run and have not computed all they know.
        self.partial: set[RequestKey] = set()
        for ask in first:
            self._add(ask)

    # -- requests in -------------------------------------------------------------------------------------------------

    @rule(new=st.lists(asks(), min_size=1, max_size=3))
    def add(self, new: list[Ask]) -> None:
        for ask in new:
            self._add(ask)

    def _add(self, ask: Ask) -> None:
        if ask.pooling is not None:
            nothing = StopConditions(max_tokens=0)
            ask = replace(ask, stop=nothing, is_resume=False, logprobs=NO_LOGPROBS)
        answer = generate(ask.prompt, ask.seed, ask.stop, MAX_MODEL_LEN)
        num_resumed = len(answer.output_token_ids) // 2 if ask.is_resume else 0
        request = make_request(
            len(self.stories),
            ask.prompt,
            seed=ask.seed,
            stop=ask.stop,
            cache_salt=ask.cache_salt,
            bypass_prefix_cache=ask.bypass_prefix_cache,
            deadline=None if ask.deadline_in is None else self.now + ask.deadline_in,
            queue_deadline=None if ask.queue_deadline_in is None else self.now + ask.queue_deadline_in,
            output_token_ids=answer.output_token_ids[:num_resumed],
            logprobs=ask.logprobs,
            pooling=None if ask.pooling is None else PoolingParams(type=ask.pooling),
            arrival_time=self.now - ask.age,
            priority=ask.priority,
            client_class=ask.client_class,
        )
        expected_reason = self._refusal(request)
        self.stories[request.key] = Story(request, answer, num_resumed)
        self._take(self.scheduler.add_request(request, self.now))
        finish = self.stories[request.key].finish
        assert (finish and finish.error and finish.error.reason) == expected_reason

    def _refusal(self, request: Request) -> str | None:
        config, waiting = self.scheduler.config, list(self.scheduler.waiting)
        num_tokens = request.num_prompt_tokens + request.stop.max_tokens
        if self.layout.most_blocks(num_tokens) > self.scheduler.kv_cache_manager.pool.num_total:
            return "KV_CAPACITY"
        num_queued_tokens = sum(queued.num_tokens for queued in waiting)
        if len(waiting) >= config.max_queued_requests:
            return "QUEUE_FULL"
        return "QUEUE_FULL" if num_queued_tokens + request.num_tokens > config.max_queued_tokens else None

    # -- ends from outside -------------------------------------------------------------------------------------------

    def _live(self) -> list[RequestKey]:
        return [key for key, story in self.stories.items() if story.finish is None]

    @precondition(lambda self: self.stories)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Any mix of live, ended, unknown and repeated keys."""
        known = st.sampled_from(sorted(self.stories))
        self._abort(data.draw(st.lists(known | st.just(("stranger", 0)), max_size=3)))

    @rule(is_meant=st.sampled_from([False, False, False, False, True]))
    def abort_all(self, is_meant: bool) -> None:
        """Rare, because it ends whatever had become interesting."""
        self._abort(None if is_meant else [])

    def _abort(self, keys: list[RequestKey] | None) -> None:
        expected = set(self._live()) & set(self._live() if keys is None else keys)
        outputs = self.scheduler.finish_requests(keys, RequestStatus.FINISHED_ABORTED)
        assert {output.key for output in outputs} == expected
        for output in outputs:
            assert output.finish is not None
            assert output.finish.reason is FinishReason.ABORTED
            self._take(output)

    @rule(delay=st.integers(1, 4))
    def pass_time(self, delay: int) -> None:
        self.now += delay

    # -- pauses and resets -------------------------------------------------------------------------------------------

    @rule(state=st.sampled_from([PauseState.NONE, PauseState.NONE, PauseState.NEW, PauseState.ALL]))
    def pause(self, state: PauseState) -> None:
        self.scheduler.pause_state = state

    @rule(preempts=st.sampled_from([False, True]))
    def reset_prefix_cache(self, preempts: bool) -> None:
        if preempts:
            while self.flights:
                self._land()
            self.scheduler.preempt_all(self.now)
        stats = self.scheduler.stats()
        assert not (preempts and stats.num_used_blocks)
        assert self.scheduler.kv_cache_manager.pool.reset_prefix_cache() == (stats.num_used_blocks == 0)
        if not stats.num_used_blocks:
            assert self.scheduler.stats().num_cached_blocks == 0

    # -- steps -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), abort_meanwhile=st.sampled_from([False, False, False, True]))
    def step(self, data: st.DataObject, abort_meanwhile: bool) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.stories)), max_size=2)) if abort_meanwhile else []
        self._step(keys)

    @precondition(lambda self: self.stories)
    @rule(num_steps=st.integers(2, 6))
    def several_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step([])

    def _step(self, abort_meanwhile: list[RequestKey]) -> None:
        """As EngineCore does it: plan while there is room, and wait for the oldest step when there is none."""
        has_planned = self._plan()
        self._abort(abort_meanwhile)
        if self.flights and (len(self.flights) == self.max_in_flight or not has_planned):
            self._land()

    def _plan(self) -> bool:
        expiring = self._expiring()
        ran_before = list(self.scheduler.running)
        step = self.scheduler.schedule(self.now)
        self._take_expired(expiring)
        assert self.scheduler.check_integrity() == []
        self._check_limits(step)
        self._check_partial_prefills(step)
        self._check_victims(ran_before)
        self._check_admissions(step)
        may_advance = self._may_advance() - expiring.keys()
        assert step.num_scheduled_tokens.keys() <= may_advance
        for key in step.num_scheduled_tokens:
            self.stories[key].was_scheduled = True
        # Something always progresses, or "waits for ever" is possible.
        assert step.num_scheduled_tokens or self.flights or not may_advance
        if step.is_empty:
            return False
        scheduled = step.num_scheduled_tokens.items()
        flight = Flight(
            step,
            written={key: self._blocks_of(key, num, reads=False) for key, num in scheduled},
            used={key: self._blocks_of(key, num, reads=True) for key, num in scheduled},
        )
        self._check_fences(flight)
        self.flights.append(flight)
        return True

    def _take_expired(self, expiring: dict[RequestKey, set[str]]) -> None:
        expired: dict[RequestKey, str] = {}
        for output in self.scheduler.take_expired_outputs():
            self._take(output)
            assert output.finish is not None
            assert output.finish.error is not None
            expired[output.key] = output.finish.error.reason
        assert set(expired) == set(expiring)
        for key, reason in expired.items():
            assert reason in expiring[key]

    def _blocks_of(self, key: RequestKey, num_tokens: int, *, reads: bool) -> set[int]:
        end = self.scheduler.requests[key].num_computed_tokens
        tables = self.scheduler.kv_cache_manager.block_ids(key)
        found: set[int] = set()
        for group, table in zip(self.layout.groups, tables, strict=True):
            start = end - num_tokens
            start = max(0, start + 1 - (group.sliding_window or end)) if reads else start
            found |= {table[position // self.block_size] for position in range(start, end)}
        return found

    def _check_fences(self, new: Flight) -> None:
        """No block is handed out that a step in flight reads or writes for somebody else."""
        for flight in self.flights:
            for key, used in flight.used.items():
                for other, written in new.written.items():
                    assert key == other or not used & written

    def _land(self) -> None:
        step = self.flights.popleft().step
        for output in self.scheduler.update_from_output(step, self.worker.execute(step), self.now):
            self._take(output)

    def _may_advance(self) -> set[RequestKey]:
        """Whom the pause lets have tokens."""
        match self.scheduler.pause_state:
            case PauseState.NONE:
                return set(self._live())
            case PauseState.NEW:
                return {key for key in self._live() if self.stories[key].was_scheduled}
            case PauseState.ALL:
                return set()

    def _expiring(self) -> dict[RequestKey, set[str]]:
        expiring: dict[RequestKey, set[str]] = {}
        for key in self._live():
            story = self.stories[key]
            deadline, queue_deadline = story.request.deadline, story.request.queue_deadline
            if deadline is not None and deadline <= self.now:
                expiring.setdefault(key, set()).add("DEADLINE")
            if queue_deadline is not None and queue_deadline <= self.now and not story.was_scheduled:
                expiring.setdefault(key, set()).add("QUEUE_TIMEOUT")
        return expiring

    def _check_limits(self, step: SchedulerOutput) -> None:
        config = self.scheduler.config
        for data in step.new_requests:
            assert data.num_computed_tokens == 0 or not self.scheduler.requests[data.key].bypass_prefix_cache
        assert step.total_num_scheduled_tokens <= config.max_num_batched_tokens
        assert len(step.num_scheduled_tokens) <= config.max_num_seqs
        for key, num_tokens in step.num_scheduled_tokens.items():
            request = self.scheduler.requests[key]
            assert num_tokens > 0
            if config.long_prefill_token_threshold:
                assert num_tokens <= config.long_prefill_token_threshold
            if not config.enable_chunked_prefill:
                assert request.num_computed_tokens >= request.num_tokens

    def _check_partial_prefills(self, step: SchedulerOutput) -> None:
        """Never more prompts in chunks than the limit."""
        self.partial = {
            request.key
            for request in self.scheduler.running
            if (
                request.num_computed_tokens < request.num_tokens
                if request.key in step.num_scheduled_tokens
                else request.key in self.partial
            )
        }
        limit = self.scheduler.config.max_num_partial_prefills
        assert not limit or len(self.partial) <= limit

    def _rank(self, request: Request) -> tuple[float, ...]:
        """Who runs before whom, and is preempted after whom."""
        if self.scheduler.config.scheduling_policy is SchedulingPolicy.FCFS:
            return (request.key[1],)
        return (request.priority, request.arrival_time, request.key[1])

    def _check_victims(self, ran_before: list[Request]) -> None:
        """Whoever was preempted in this step ranks behind whoever still runs."""
        victims = [request for request in ran_before if request.status is RequestStatus.PREEMPTED]
        for victim in victims:
            assert all(self._rank(request) < self._rank(victim) for request in self.scheduler.running)

    def _check_admissions(self, step: SchedulerOutput) -> None:
        """Nobody was admitted before another who waits still, and has a better priority, or has begun and no worse one.

        Nor before one of the same class who came earlier: classes take turns, the requests of a class do not.
        """
        new = {data.key for data in step.new_requests}
        resumed = {data.key for data in step.cached_requests if data.is_resumed}
        for admitted in (self.scheduler.requests[key] for key in new | resumed):
            for other in self.scheduler.waiting:
                if self.scheduler.pause_state is PauseState.NEW and not other.was_scheduled:
                    continue
                place, other_place = (admitted.priority, admitted.key in new), (other.priority, not other.was_scheduled)
                assert place <= other_place
                if place == other_place and (not place[1] or admitted.fairness_key == other.fairness_key):
                    assert self._rank(admitted) < self._rank(other)

    def _take(self, output: EngineCoreOutput) -> None:
        story = self.stories[output.key]
        assert story.finish is None, f"{output.key} has news after its end"
        has_news = output.new_token_ids or output.events or output.finish or output.prompt_logprobs
        assert has_news, f"{output.key} has no news"
        story.new_token_ids.extend(output.new_token_ids)
        story.logprobs += [output.logprobs] if output.logprobs else []
        story.prompt_logprobs += [output.prompt_logprobs] if output.prompt_logprobs else []
        story.pooled, story.finish = output.pooled, output.finish
        if story.request.pooling is None:
            self._check_answer(story)
            self._check_logprobs(story)
        else:
            self._check_vector(story, story.request.pooling)

    def _check_answer(self, story: Story) -> None:
        """Whatever happened on the way, the tokens are those of the request run alone; early ends are prefixes."""
        expected = story.answer.output_token_ids[story.num_resumed :]
        if story.finish is None or story.finish.error or story.finish.reason is FinishReason.ABORTED:
            assert story.new_token_ids == expected[: len(story.new_token_ids)]
            assert len(story.new_token_ids) < len(expected)
        else:
            assert story.new_token_ids == expected
            assert story.finish.reason is story.answer.reason
            assert story.finish.stop_token_id == story.answer.stop_token_id

    def _check_vector(self, story: Story, pooling: PoolingParams) -> None:
        """It comes with the end, and holds each token of the prompt once, or the last one alone."""
        assert (story.new_token_ids, story.logprobs, story.prompt_logprobs) == ([], [], [])
        if story.finish is None or story.finish.reason is not FinishReason.STOP:
            assert story.pooled is None
        else:
            num_tokens = story.request.num_prompt_tokens
            assert story.pooled == bytes(range(0 if pooling.needs_all_tokens else num_tokens - 1, num_tokens))

    def _check_logprobs(self, story: Story) -> None:
        """One row for each token, each row of the prompt once and before any output, however often it was computed."""
        asked, prompt = story.request.logprobs, story.request.prompt_token_ids
        num_new = len(story.new_token_ids)
        if asked.num_output is not None and num_new:
            expected = fake_rows(story.new_token_ids, len(prompt) + story.num_resumed, asked.num_output)
            assert PackedLogprobs.join(story.logprobs) == expected
        else:
            assert story.logprobs == []
        if asked.num_prompt is None:
            assert story.prompt_logprobs == []
        elif story.prompt_logprobs:
            rows = PackedLogprobs.join(story.prompt_logprobs)
            assert rows == fake_rows(prompt[1 : rows.num_rows + 1], 1, asked.num_prompt)
            assert not num_new or rows.num_rows == len(prompt) - 1
        else:
            assert not num_new or len(prompt) == 1

    # -- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        assert self.scheduler.check_integrity() == []

    @invariant()
    def the_listener_knows_what_can_be_hit(self) -> None:
        """Aborts, preemptions and resets included."""
        pool = self.scheduler.kv_cache_manager.pool
        self.listener.apply(pool.take_events())
        cached = {(block.group, block.block_hash) for block in pool.blocks if block.block_hash}
        assert self.listener.contents.keys() == cached

    @invariant()
    def every_live_request_is_known_and_no_other(self) -> None:
        assert set(self.scheduler.requests) == set(self._live())
        stats = self.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self._live())
        assert stats.num_running <= self.scheduler.config.max_num_seqs

    @invariant()
    def nobody_overtakes(self) -> None:
        """First come, first served: whoever runs came before whoever waits, preempted or not."""
        assert self.scheduler.running == sorted(self.scheduler.running, key=self._rank)
        if self.scheduler.config.scheduling_policy is SchedulingPolicy.FCFS:
            in_order = [*self.scheduler.running, *self.scheduler.waiting]
            assert [request.key for request in in_order] == sorted(self.scheduler.requests)

    @invariant()
    def nothing_is_left_when_idle(self) -> None:
        if self.scheduler.has_work or self.flights:
            return
        assert self._may_advance() == set()
        assert self.worker.requests.keys() <= set(self._live())
        if not self._live():
            assert self.scheduler.stats().num_used_blocks == 0

    def teardown(self) -> None:
        """Every request ends, the worker hears of each end once, and the cache is empty."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.pause_state = PauseState.NONE
        # The first of the running requests is never preempted, so each step brings it one token further. One that comes
        # before it may take what it has computed, once for each other request at most.
        limit = (len(self._live()) + 1) * sum(self.stories[key].request.max_num_tokens for key in self._live()) + 2
        for _ in range(self.max_in_flight * limit):
            if not (self.scheduler.has_work or self.flights):
                break
            self._step([])
            self.sound()
        assert not self.scheduler.has_work
        assert not self.flights
        self.nothing_is_left_when_idle()
        scheduled = [key for key, story in self.stories.items() if story.was_scheduled]
        assert sorted(self.worker.finished_keys) == sorted(scheduled)
        assert all(story.finish for story in self.stories.values())


class FurtherSchedulerMachine(SchedulerMachine):
    """The same from another seed: the examples that would make the fast tests slow."""


# Fences; counters of tokens in flight; somebody always progresses, and what never fits is refused.
REGRESSION = [pytest.mark.regression(row) for row in (8, 11, 12)]

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=2 * EXAMPLES, stateful_step_count=40)
TestScheduler.pytestmark = REGRESSION

TestFurtherScheduler = FurtherSchedulerMachine.TestCase
TestFurtherScheduler.settings = settings(max_examples=18 * EXAMPLES, stateful_step_count=40)
TestFurtherScheduler.pytestmark = [*REGRESSION, pytest.mark.slow, pytest.mark.timeout(3600)]
