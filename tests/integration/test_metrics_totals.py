"""Under a load of every kind, with aborts, refusals, a death and a restart, metrics say what the callers counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import engine_core.metrics
import frontend.metrics
from free_ports import free_port
from metered_load import TIMEOUT_S, MeteredLoad, make_request
from running_stack import SERVING, Frontend, Service, Stack, running_stack
from scraped import OPENMETRICS, Scrape, by, total

pytestmark = pytest.mark.slow

MAX_NUM_SEQS = 4
STAYING, DYING = "engine-0", "engine-1"
STREAM = "/stepwire.v1.GenerationService/GenerateStream"
ENGINE_FLAGS = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", "256")


@pytest.fixture
def fake_stack(tokenizer_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tokenizer_dir, tmp_path / "cache") as stack:
        yield stack


@pytest.fixture
def real_stack(embedded_model_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    with running_stack(embedded_model_dir, tmp_path / "cache") as stack:
        yield stack


class Fleet:
    """Two engines with addresses of their own."""

    def __init__(self, stack: Stack, package: str, *flags: str) -> None:
        self._stack, self._package, self._flags = stack, package, flags
        self._ports = {name: free_port() for name in (STAYING, DYING)}
        self.engines = {name: self.start(name) for name in self._ports}

    def start(self, name: str) -> Service:
        rank = str((STAYING, DYING).index(name))
        flags = (*ENGINE_FLAGS, "--engine-id", name, *self._flags)
        flags += ("--data-parallel-rank", rank, "--data-parallel-size", "2")
        return self._stack.engine(*flags, port=self._ports[name], package=self._package)


async def test_totals_are_those_of_the_callers(fake_stack: Stack, tokenizer_dir: Path) -> None:
    fleet = Fleet(fake_stack, "fakes.fake_engine_process", "--fake-slow-step-s", "0.05")
    engines = fleet.engines.values()
    frontends = [fake_stack.frontend(*engines, flags=("--tokenizer", str(tokenizer_dir))) for _ in range(2)]
    await check_totals(fleet, frontends)


async def test_totals_are_those_of_the_callers_with_a_real_model(real_stack: Stack) -> None:
    fleet = Fleet(real_stack, "engine_core", "--kv-cache-memory", "512MiB", "--num-threads", "1")
    frontends = [real_stack.frontend(*fleet.engines.values()) for _ in range(2)]
    await check_totals(fleet, frontends)


async def check_totals(fleet: Fleet, frontends: Sequence[Frontend]) -> None:
    for one in frontends:
        one.wait_for_health(SERVING)
        wait_until(lambda one=one: Scrape(one.metrics_port).total("stepwire_frontend_engine_up") == 2)
    load = MeteredLoad(frontends)
    await load.burst(60, stop_token_ids=range(3, 300))
    wait_idle(fleet, frontends)
    check_engines(load, fleet)
    await end_in_every_other_way(load, fleet)
    await asyncio.to_thread(fleet.engines[DYING].kill)
    fleet.engines[DYING] = await asyncio.to_thread(fleet.start, DYING)
    for one in frontends:
        wait_until(lambda one=one: Scrape(one.metrics_port).total("stepwire_frontend_engine_up") == 2)
    await load.burst(20, stop_token_ids=range(3, 300))
    wait_idle(fleet, frontends)
    check_frontends(load, frontends)
    await load.close()


async def end_in_every_other_way(load: MeteredLoad, fleet: Fleet) -> None:
    """Engines full of long requests: some wait and are cancelled or time out, some are aborted, some lose theirs."""
    occupants = await load.occupy(2 * MAX_NUM_SEQS)
    waiting = [load.send(make_request(40, 41 + n, max_tokens=5)) for n in range(6)]
    timed_out = [load.send(make_request(50, 51 + n, max_tokens=5, queue_timeout_ms=50)) for n in range(4)]
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(caller.accepted.wait() for caller in waiting))
        await asyncio.to_thread(check_full, fleet, len(waiting))
        await asyncio.gather(*(caller.cancel() for caller in waiting), *(caller.task for caller in timed_out))
        await asyncio.gather(*(caller.abort() for caller in occupants if caller.engine_id == STAYING))
        dying = [caller for caller in occupants if caller.engine_id == DYING]
        assert dying
        await asyncio.to_thread(fleet.engines[DYING].kill)
        await asyncio.gather(*(caller.task for caller in dying))


def check_full(fleet: Fleet, num_waiting: int) -> None:
    """In the middle of the load: every place is taken, the others wait, and no counter goes down."""

    def scrape() -> list[Scrape]:
        return [Scrape(engine.metrics_port) for engine in fleet.engines.values()]

    # Those that time out are gone by then.
    wait_until(lambda: total(scrape(), "vllm:num_requests_waiting") == num_waiting)
    before, after = scrape(), scrape()
    for earlier, later in zip(before, after, strict=True):
        later.check_against(engine_core.metrics.ROWS)
        assert later.total("vllm:num_requests_running") == MAX_NUM_SEQS
        assert 0 < later.total("vllm:kv_cache_usage_perc") <= 1
        assert earlier.counters.keys() <= later.counters.keys()
        assert all(value <= later.counters[series] for series, value in earlier.counters.items())
    assert total(after, "stepwire_engine_core_requests_waiting_by_reason", reason="capacity") == num_waiting
    assert max(one.total("stepwire_engine_core_oldest_waiting_seconds") for one in after) > 0


def check_engines(load: MeteredLoad, fleet: Fleet) -> None:
    """While nothing has died: both services agree with the callers."""
    scrapes = [Scrape(engine.metrics_port) for engine in fleet.engines.values()]
    counts = load.counts
    assert total(scrapes, "stepwire_engine_core_prompt_tokens_total") == counts.num_engine_prompt_tokens
    assert total(scrapes, "stepwire_engine_core_generation_tokens_total") == counts.num_output_tokens
    for name in ("queue", "prefill", "decode", "inference"):
        assert total(scrapes, f"stepwire_engine_core_request_{name}_seconds_count") == counts.num_choices
    sent = total(scrapes, "stepwire_engine_core_stream_frames_total", direction="in", kind="add")
    assert 0 < sent <= counts.num_submitted
    for scrape in scrapes:
        assert scrape.total("stepwire_engine_core_steps_total") > 0
        phases = scrape.by("stepwire_engine_core_step_phase_seconds_count", "phase")
        assert phases["execute"] == scrape.total("stepwire_engine_core_steps_total")


def check_frontends(load: MeteredLoad, frontends: Sequence[Frontend]) -> None:
    scrapes = [Scrape(one.metrics_port) for one in frontends]
    counts, prefix = load.counts, "stepwire_frontend_"
    assert by(scrapes, f"{prefix}requests_finished_total", "finished_reason") == counts.ends
    assert by(scrapes, f"{prefix}requests_rejected_total", "reason") == counts.rejected
    assert set(counts.ends) >= {"stop", "length", "abort", "error"}
    assert total(scrapes, f"{prefix}request_prompt_tokens_sum") == counts.num_prompt_tokens
    assert total(scrapes, f"{prefix}request_generation_tokens_sum") == counts.num_output_tokens
    assert total(scrapes, f"{prefix}request_choices_sum") == counts.num_choices
    for name in ("request_prompt_tokens", "request_generation_tokens", "request_choices", "request_duration_seconds"):
        assert total(scrapes, f"{prefix}{name}_count") == counts.num_submitted, name
    assert total(scrapes, f"{prefix}time_to_first_token_seconds_count") == counts.num_with_tokens
    calls = {"grpc_method": STREAM}
    handled = {code: total(scrapes, f"{prefix}rpcs_handled_total", grpc_code=code, **calls) for code in counts.codes}
    assert handled == counts.codes
    assert total(scrapes, f"{prefix}rpc_duration_seconds_count", **calls) == sum(counts.codes.values())
    assert total(scrapes, f"{prefix}rpc_messages_total", direction="in", **calls) == sum(counts.codes.values())
    assert by(scrapes, f"{prefix}engine_deaths_total", "kind") == {"transport": 2}
    assert by(scrapes, f"{prefix}engine_reconnects_total", "result") == {"new_boot": 2}
    for name in ("admission_seconds_count", "output_processing_seconds_count", "engine_ping_seconds_count"):
        assert total(scrapes, f"{prefix}{name}") > 0, name


def wait_idle(fleet: Fleet, frontends: Sequence[Frontend]) -> None:
    """Every gauge of work is back at 0, and all that is served is what is declared."""
    engine_gauges = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "queued_prompt_tokens")
    engine_gauges += ("oldest_waiting_seconds", "kv_fenced_blocks", "outbox_bytes", "queue_depth", "step_age_seconds")
    frontend_gauges = ("requests_in_flight", "live_handles", "transport_queue_depth", "tokenize_queue_depth")
    for services, gauges, prefix, rows in (
        (fleet.engines.values(), engine_gauges, "stepwire_engine_core", engine_core.metrics.ROWS),
        (frontends, frontend_gauges, "stepwire_frontend", frontend.metrics.ROWS),
    ):
        for service in services:
            for name in gauges:
                wait_until(lambda s=service, n=f"{prefix}_{name}": Scrape(s.metrics_port).total(n) == 0)
            for accept in ("text/plain", OPENMETRICS):
                Scrape(service.metrics_port, accept).check_against(rows)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
