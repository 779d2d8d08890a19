"""What the workers of one frontend share, and the supervisor's parts, without processes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import ValidationError

from frontend.config import FrontendSettings
from frontend.workers.control_channel import ChannelClosedError, ControlChannel, Handler
from frontend.workers.metrics_sum import add_up, cumulative_part, take_snapshot
from frontend.workers.relay import Relay
from frontend.workers.request_ids import RequestIds
from frontend.workers.reserved_port import ReservedPort
from frontend.workers.settings_of_workers import part_of, settings_of
from scraped import OPENMETRICS
from stepwire import grpc_options
from stepwire.listen_address import BindError
from stepwire.metrics import encoder_for

KEY = ("caller", "id")


def test_an_id_is_one_workers_until_that_one_releases_it_or_is_gone():
    ids = RequestIds()
    assert ids.claim(0, KEY) == 0
    assert ids.claim(1, KEY) == 0
    ids.release(1, KEY)
    assert ids.claim(1, KEY) == 0
    assert ids.claim(1, ("another caller", "id")) == 1
    ids.release(0, KEY)
    assert ids.claim(1, KEY) == 1
    ids.forget(1)
    assert ids.claim(0, KEY) == 0


def test_ids_are_looked_up_where_they_run():
    ids = RequestIds()
    for worker, request_id in enumerate(("a", "b", "c")):
        ids.claim(worker, ("caller", request_id))
    assert ids.by_owner("caller", ["a", "b", "c", "d"], asker=1) == {0: ["a"], 2: ["c"]}
    assert ids.by_owner("stranger", ["a", "b"], asker=1) == {}


@pytest.mark.parametrize("limit", [2, 7, 1024, 1025])
def test_parts_of_a_limit_sum_up_to_it(limit: int):
    parts = [part_of(limit, worker, 2) for worker in range(2)]
    assert sum(parts) == limit
    assert min(parts) >= 1


def test_a_worker_has_its_part_of_the_limits_and_a_name_of_its_own():
    settings = FrontendSettings(workers=3, max_concurrent_requests=10, client_id="here")
    ours = [settings_of(worker, settings) for worker in range(3)]
    assert [one.max_concurrent_requests for one in ours] == [4, 3, 3]
    assert [one.client_id for one in ours] == ["here-0", "here-1", "here-2"]
    assert sum(one.max_concurrent_prompt_tokens for one in ours) == settings.max_concurrent_prompt_tokens


def test_limits_that_can_not_be_divided_are_refused_by_name():
    with pytest.raises(ValidationError, match=r"--max-concurrent-requests: 3 can not be divided among 4 workers"):
        FrontendSettings(workers=4, max_concurrent_requests=3)


def test_a_port_is_shared_among_workers_alone():
    shared, alone = dict(grpc_options.SHARED_PUBLIC_SERVER), dict(grpc_options.PUBLIC_SERVER)
    assert (shared.pop("grpc.so_reuseport"), alone.pop("grpc.so_reuseport")) == (1, 0)
    assert shared == alone


def worker_registry(num_requests: int, is_up: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("requests", "Requests.", ("code",), registry=registry).labels("OK").inc(num_requests)
    Gauge("in_flight", "In flight.", registry=registry).set(num_requests)
    Gauge("stepwire_frontend_engine_up", "Up.", ("engine_id",), registry=registry).labels("e").set(is_up)
    Gauge("stepwire_frontend_config_info", "1.", ("limit",), registry=registry).labels("8").set(1)
    duration = Histogram("duration", "Duration.", buckets=(1, 10), registry=registry)
    duration.observe(num_requests, {"trace_id": f"of-{num_requests}"})
    return registry


def test_metrics_of_workers_are_those_of_one_frontend_and_the_dead_keep_their_counts():
    dead, one, other = (take_snapshot(worker_registry(*of).collect()) for of in ((5, 1), (2, 1), (3, 0)))
    families = add_up([cumulative_part(dead), one, other])
    values = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert values["requests_total", "OK"] == 10
    assert values["in_flight",] == 5
    assert values["stepwire_frontend_engine_up", "e"] == 0
    assert values["stepwire_frontend_config_info", "8"] == 1
    assert values["duration_bucket", "1.0"] == 0
    assert values["duration_bucket", "10.0"] == 3
    assert values["duration_sum",] == 10


def test_an_example_of_a_trace_crosses_the_channel_and_the_last_one_stays():
    one, other = (take_snapshot(worker_registry(num, 1).collect()) for num in (3, 2))
    no_example = take_snapshot(CollectorRegistry().collect())
    for snapshots, last in (([one, other, no_example], 2), ([other, one], 3)):
        families = add_up(json.loads(json.dumps(snapshots)))
        encode, _ = encoder_for(OPENMETRICS)
        text = encode(SimpleNamespace(collect=families.copy)).decode()
        assert re.findall(r"^duration_bucket(.*) # (.*)$", text, re.MULTILINE) == [
            ('{le="10.0"} 2.0', f'{{trace_id="of-{last}"}} {last}.0')
        ]


def test_a_reserved_port_goes_to_those_who_share_it_and_to_no_listener_twice():
    held = ReservedPort("127.0.0.1", 0)
    with socket.socket() as worker:
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        worker.bind(("127.0.0.1", held.port))
        worker.listen()
        with pytest.raises(BindError, match="port in use by another process"):
            ReservedPort("127.0.0.1", held.port)
    held.close()
    ReservedPort("127.0.0.1", held.port).close()


@asynccontextmanager
async def channel_pair(ours: dict[str, Handler], theirs: dict[str, Handler]) -> AsyncIterator[list[ControlChannel]]:
    ends = [await ControlChannel.open(end) for end in socket.socketpair()]
    running = [asyncio.create_task(end.run(of)) for end, of in zip(ends, (ours, theirs), strict=True)]
    try:
        yield ends
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def test_both_ends_of_a_channel_call_and_a_call_ends_with_the_other_end():
    may_answer, asked = asyncio.Event(), asyncio.Event()

    async def double(number: int) -> int:
        return 2 * number

    async def late() -> str:
        asked.set()
        await may_answer.wait()
        return "x" * 1_000_000

    async def broken() -> None:
        raise ValueError("broken")

    async with channel_pair({"double": double}, {"late": late, "broken": broken}) as (one, other):
        waiting = asyncio.create_task(one.call("late"))
        await asked.wait()
        assert await other.call("double", number=21) == 42
        with pytest.raises(ChannelClosedError):
            await one.call("broken")
        may_answer.set()
        assert len(await waiting) == 1_000_000
        may_answer.clear()
        asked.clear()
        lost = asyncio.create_task(one.call("late"))
        await asked.wait()
    with pytest.raises(ChannelClosedError):
        await lost
    with pytest.raises(ChannelClosedError):
        await one.call("late")


class Answering:
    """Another worker, at the end of its channel."""

    def __init__(self, answer: object) -> None:
        self.channel = self
        self.answer = answer
        self.told: list[object] = []

    async def call(self, name: str, **arguments: object) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def tell(self, name: str, **arguments: object) -> None:
        self.told.append((name, arguments))


@pytest.mark.parametrize(
    ("answer", "outcome"), [(7, 7), (None, None), (ChannelClosedError("gone"), None)], ids=["runs", "ended", "gone"]
)
async def test_an_id_that_another_worker_has_is_refused_as_long_as_it_runs_there(answer: object, outcome: int | None):
    relay = Relay({0: Answering(answer)})  # type: ignore[dict-item]
    assert await relay.claim(0, *KEY) is None
    assert await relay.claim(1, *KEY) == outcome
    await relay.release(1, *KEY)


class Pondering(Answering):
    """Another worker that takes its time."""

    def __init__(self) -> None:
        super().__init__(None)
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def call(self, name: str, **arguments: object) -> object:
        self.is_asked.set()
        await self.may_answer.wait()
        return self.answer


@pytest.mark.parametrize("end", ["released", "gone"])
async def test_who_gives_up_before_its_claim_is_answered_does_not_get_the_id(end: str):
    slow, never_asked = Pondering(), Answering(7)
    relay = Relay({0: slow, 1: never_asked})  # type: ignore[dict-item]
    assert await relay.claim(0, *KEY) is None
    claiming = asyncio.create_task(relay.claim(1, *KEY))
    await slow.is_asked.wait()
    if end == "released":
        await relay.release(1, *KEY)
    else:
        relay.forget(1)
    slow.may_answer.set()
    assert await claiming is None
    # Had it got the id, this worker would be asked, and the third one be refused.
    assert await relay.claim(2, *KEY) is None


async def test_who_gives_up_and_comes_back_gets_the_id_once():
    slow = Pondering()
    relay = Relay({0: slow, 1: Answering(7)})  # type: ignore[dict-item]
    assert await relay.claim(0, *KEY) is None
    first = asyncio.create_task(relay.claim(1, *KEY))
    await slow.is_asked.wait()
    await relay.release(1, *KEY)
    second = asyncio.create_task(relay.claim(1, *KEY))
    slow.may_answer.set()
    assert (await first, await second) == (None, None)
    assert await relay.claim(2, *KEY) == 7
    await relay.release(1, *KEY)
    assert await relay.claim(2, *KEY) is None


async def test_a_drain_holds_for_workers_that_come_later():
    relay = Relay({0: Answering(None), 1: Answering((True, 3, 2.5))})  # type: ignore[dict-item]
    late = Answering(None)
    relay.welcome(late)  # type: ignore[arg-type]
    assert late.told == []
    assert await relay.drain(0, timeout_s=4.0, reason="update") == (True, 3, 2.5)
    relay.welcome(late)  # type: ignore[arg-type]
    assert late.told == [("drain", {"timeout_s": 4.0, "reason": "update"})]
