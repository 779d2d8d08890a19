"""The load behind `stepwire bench` without a server: what is drawn, when it is sent, what the figures say."""

from __future__ import annotations

import asyncio
import json
from itertools import islice

import pytest

from stepwire_client.load import plan as load_plan
from stepwire_client.load.loops import LoadResult, arrival_times, closed_loop, open_loop
from stepwire_client.load.plan import Load, Plan
from stepwire_client.load.reply import Reply, RequestFailed
from stepwire_client.load.summary import percentile, summarize
from stepwire_client.load.workload import Lengths, LoadRequest, from_prompts, read_prompts, synthetic

REQUESTS = [LoadRequest([index], 2) for index in range(6)]


class ScriptedTarget:
    """Answers a request when its gate is open; prompt [3] is refused."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Event] = {}
        self.sent: list[int] = []
        self.running = 0
        self.most_running = 0
        self.all_sent = asyncio.Event()

    async def complete(self, request: LoadRequest, reply: Reply) -> None:
        [prompt] = request.prompt_token_ids
        self.sent.append(prompt)
        if len(self.sent) == len(REQUESTS):
            self.all_sent.set()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await self.gates.get(prompt, _open()).wait()
        # Whoever may run beside it gets its turn.
        await asyncio.sleep(0)
        self.running -= 1
        if prompt == 3:
            raise RequestFailed("QUEUE_FULL", "no room")
        reply.chunk_times += [reply.started + 1, reply.started + 2]
        reply.num_tokens = 2

    async def close(self) -> None: ...


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def test_lengths_are_fixed_or_of_a_range():
    drawn = [request.max_tokens for request in islice(synthetic(Lengths(4, 4), Lengths(1, 3), 0, 100, "s"), 200)]
    assert set(drawn) == {1, 2, 3}
    assert Lengths.parse("16:1500") == Lengths(16, 1500)
    assert Lengths.parse("64") == Lengths(64, 64)


@pytest.mark.parametrize("text", ["0", "5:4", "a", "", "1:2:3", "-1"])
def test_other_lengths_are_refused(text: str):
    with pytest.raises(ValueError):
        Lengths.parse(text)


def test_random_prompts_share_the_prefix_and_nothing_else():
    first, second = islice(synthetic(Lengths(40, 40), Lengths(1, 1), 30, 1000, "s"), 2)
    assert len(first.prompt_token_ids) == len(second.prompt_token_ids) == 40
    assert first.prompt_token_ids[:30] == second.prompt_token_ids[:30]
    assert first.prompt_token_ids[30:] != second.prompt_token_ids[30:]


def test_equal_seeds_draw_equal_requests_and_arrivals():
    def draw(seed: str) -> list[LoadRequest]:
        return list(islice(synthetic(Lengths(1, 9), Lengths(1, 9), 0, 1000, seed), 5))

    assert draw("1") == draw("1") != draw("2")
    assert arrival_times(5, 2.0, 1) == arrival_times(5, 2.0, 1) != arrival_times(5, 2.0, 2)


def test_arrivals_have_the_rate_and_are_not_regular():
    times = arrival_times(20_000, 50.0, 0)
    assert times[-1] == pytest.approx(400, rel=0.05)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    # Of an exponential distribution.
    assert sum(gap < 0.02 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.02)


def test_given_prompts_go_round_from_the_first_one_asked_for():
    requests = islice(from_prompts([[1], [2], [3]], Lengths(1, 1), 2, ""), 4)
    assert [request.prompt_token_ids for request in requests] == [[3], [1], [2], [3]]


def test_a_prompts_file_holds_lists_or_a_shared_beginning(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"short": [[1, 2], [3]], "prefix": {"shared": [1, 2], "own": [[3], [4]]}}))
    assert read_prompts(file, "short") == [[1, 2], [3]]
    assert read_prompts(file, "prefix") == [[1, 2, 3], [1, 2, 4]]
    with pytest.raises(ValueError, match="no JSON object with prompts of kind 'long'"):
        read_prompts(file, "long")


async def test_a_closed_loop_keeps_so_many_in_flight_and_passes_failures_over():
    target = ScriptedTarget()
    result = await closed_loop(target, REQUESTS, 2)
    assert sorted(target.sent) == [0, 1, 2, 3, 4, 5]
    assert target.most_running == 2
    assert [reply.failure for reply in result.replies].count("QUEUE_FULL") == 1


async def test_a_closed_loop_sends_the_next_when_one_ends():
    target = ScriptedTarget()
    target.gates[0] = asyncio.Event()
    load = asyncio.create_task(closed_loop(target, REQUESTS, 2))
    await target.all_sent.wait()
    assert not load.done()
    target.gates[0].set()
    assert len((await load).replies) == 6


async def test_an_open_loop_waits_for_no_answer_and_counts_from_when_a_request_was_due():
    target = ScriptedTarget()
    target.gates = {prompt: asyncio.Event() for prompt in range(6)}
    load = asyncio.create_task(open_loop(target, REQUESTS, 10_000.0, 0))
    await target.all_sent.wait()
    for gate in target.gates.values():
        gate.set()
    replies = (await load).replies
    offsets = [reply.started - replies[0].started for reply in replies]
    due = arrival_times(6, 10_000.0, 0)
    # The clock's last digit depends on how long the machine is up.
    assert offsets == pytest.approx([time - due[0] for time in due], abs=1e-7)


async def test_an_answer_without_tokens_is_a_failure():
    class Silent(ScriptedTarget):
        async def complete(self, request: LoadRequest, reply: Reply) -> None: ...

    [reply] = (await closed_loop(Silent(), REQUESTS[:1], 1)).replies
    assert reply.failure == "NO_TOKENS"


async def measured(plan: Plan, target: ScriptedTarget) -> list[tuple[Load, int, int]]:
    return [(load, rep, len(result.replies)) async for load, rep, result in load_plan.run(plan, target)]


@pytest.mark.parametrize(("repeats", "sent"), [(True, [0, 1, 0, 1, 2, 2]), (False, [0, 1, 2, 4, 5, 6])])
async def test_repetitions_send_the_next_requests_or_the_same_again(repeats: bool, sent: list[int]):
    requests = (LoadRequest([prompt], 2) for prompt in [0, 1, 2, 4, 5, 6])
    plan = Plan([Load(concurrency=2), Load(concurrency=1)], requests, [], 0, 2, repeats, seed=0)
    target = ScriptedTarget()
    loads = [(load.concurrency, rep, count) for load, rep, count in await measured(plan, target)]
    assert loads == [(2, 0, 2), (2, 1, 2), (1, 0, 1), (1, 1, 1)]
    assert target.sent == sent


async def test_a_warm_up_that_fails_ends_the_run():
    plan = Plan([Load(concurrency=1)], iter(REQUESTS), [LoadRequest([3], 2)], 0, 1, False, seed=0)
    with pytest.raises(RequestFailed, match="no room"):
        await measured(plan, ScriptedTarget())


def test_figures_of_complete_answers_and_failures_by_reason():
    replies = [
        Reply(10.0, [10.5, 11.0, 12.5], num_tokens=5, ended=13.0),
        Reply(10.0, [11.0], num_tokens=1, ended=11.0),
        Reply(10.0, [10.1], failure="QUEUE_FULL", ended=10.2),
        Reply(10.0, failure="QUEUE_FULL", ended=10.2),
    ]
    row = summarize(LoadResult(replies, wall_s=3.0, started_at=1_000.0))
    assert row["requests"] == 4
    assert row["failed"] == 2
    assert row["errors"] == {"QUEUE_FULL": 2}
    assert row["output_tokens"] == 6
    assert row["min_tokens"] == 1
    assert row["tok_s"] == 2.0
    assert row["ttft_mean"] == 750
    assert row["ttft_p99"] == 1000
    # Two seconds for the four tokens behind the first, whatever the messages.
    assert row["itl_mean"] == 500
    assert (row["itl_p50"], row["itl_p99"]) == (500, 1500)
    assert row["e2e_mean"] == 2000
    assert (row["t_start"], row["t_end"]) == (1000.0, 1003.0)


def test_figures_where_everything_failed():
    row = summarize(LoadResult([Reply(0.0, failure="DEADLINE")], wall_s=1.0, started_at=0.0))
    assert row["tok_s"] == 0
    assert row["ttft_mean"] is row["itl_p50"] is row["e2e_p99"] is None


@pytest.mark.parametrize(("percent", "value"), [(50, 2), (75, 3), (76, 4), (99, 4), (1, 1)])
def test_percentiles_are_values_that_occurred(percent: float, value: float):
    assert percentile([1, 2, 3, 4], percent) == value
