"""Under a load of every kind, with aborts, refusals, a death and a restart, metrics say what the callers counted.

The processes themselves say it, and so does a real Prometheus that scrapes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import engine_core.metrics
import frontend.metrics
from free_ports import free_port
from metered_load import TIMEOUT_S, MeteredLoad, make_request
from recorded import Recorded
from running_prometheus import HOW, running_prometheus, wait_until
from running_stack import SERVING, Frontend, Service, Stack, running_stack
from scraped import OPENMETRICS, Scrape, Scrapes, Totals
from skips import require_program

pytestmark = pytest.mark.slow

MAX_NUM_SEQS = 4
STAYING, DYING = "engine-0", "engine-1"
STREAM = "/stepwire.v1.GenerationService/GenerateStream"
INTERVALS = ("queue", "prefill", "decode", "inference")
REQUEST_HISTOGRAMS = (
    *("request_prompt_tokens", "request_generation_tokens", "request_max_generation_tokens"),
    *("request_max_tokens", "request_choices", "request_duration_seconds"),
)
# Of work: 0 when there is none.
ENGINE_GAUGES = (
    *("requests_running", "requests_waiting", "kv_cache_usage_ratio", "queued_prompt_tokens", "oldest_waiting_seconds"),
    *("kv_fenced_blocks", "outbox_bytes", "queue_depth", "step_age_seconds"),
)
FRONTEND_GAUGES = ("requests_in_flight", "live_handles", "transport_queue_depth", "tokenize_queue_depth")
ENGINE_FLAGS = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", "256")


@pytest.fixture
def fake_stack(tokenizer_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    (tokenizer_dir / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with running_stack(tokenizer_dir, tmp_path / "cache") as stack:
        yield stack


@pytest.fixture
def real_stack(embedded_model_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    with running_stack(embedded_model_dir, tmp_path / "cache") as stack:
        yield stack


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    program = require_program("prometheus", how=HOW)
    with running_prometheus(program, tmp_path, "") as server:
        yield Recorded(server)


class Fleet:
    """Two engines with addresses of their own, the frontends before them, and a Prometheus that scrapes all."""

    def __init__(self, stack: Stack, recorded: Recorded, package: str, *flags: str) -> None:
        self._stack, self._package, self._flags = stack, package, flags
        self._ports = {name: free_port() for name in (STAYING, DYING)}
        self.recorded = recorded
        self.engines = {name: self._start(name) for name in self._ports}
        self.frontends: list[Frontend] = []
        self.http_ports = [free_port() for _ in range(2)]
        self.num_deaths = 0

    def _start(self, name: str) -> Service:
        rank = str((STAYING, DYING).index(name))
        flags = (*ENGINE_FLAGS, "--engine-id", name, *self._flags)
        flags += ("--data-parallel-rank", rank, "--data-parallel-size", "2")
        return self._stack.engine(*flags, port=self._ports[name], package=self._package)

    def serve(self, *flags: str) -> None:
        engines = self.engines.values()
        self.frontends = [self._stack.frontend(*engines, http_port=port, flags=flags) for port in self.http_ports]
        self._wait_until_whole()

    def replace(self) -> None:
        """Kill the one that dies, if nobody has, and start it again."""
        self.engines[DYING].kill()
        self.num_deaths += 1
        self.engines[DYING] = self._start(DYING)
        self._wait_until_whole()

    def settle(self) -> None:
        """All work is done, and all that it has brought is recorded."""
        wait_idle(self)
        self.recorded.catch_up()

    def _wait_until_whole(self) -> None:
        for one in self.frontends:
            one.wait_for_health(SERVING)
            port = one.metrics_port
            wait_until(
                lambda port=port: Scrape(port).total("stepwire_frontend_engine_up") == 2, "all are attached", TIMEOUT_S
            )
        self.recorded.watch(self.frontends, self.engines.values())


async def test_totals_are_those_of_the_callers(fake_stack: Stack, recorded: Recorded, tokenizer_dir: Path) -> None:
    fleet = Fleet(fake_stack, recorded, "fakes.fake_engine_process", "--fake-slow-step-s", "0.05")
    fleet.serve("--tokenizer", str(tokenizer_dir))
    load = await check_totals(fleet)
    await check_engines_over_a_death(load, fleet)
    check_frontends(load, fleet)
    await load.close()


async def test_totals_are_those_of_the_callers_with_a_real_model(real_stack: Stack, recorded: Recorded) -> None:
    fleet = Fleet(real_stack, recorded, "engine_core", "--kv-cache-memory", "512MiB", "--num-threads", "1")
    fleet.serve()
    load = await check_totals(fleet)
    await load.close()


async def check_totals(fleet: Fleet) -> MeteredLoad:
    """What a frontend counts is exact whatever dies. An engine takes with it what came after its last scrape."""
    load = MeteredLoad(fleet.frontends, fleet.http_ports)
    await load.burst(60, stop_token_ids=range(3, 300))
    fleet.settle()
    check_engines(load, fleet)
    await end_in_every_other_way(load, fleet)
    await asyncio.to_thread(fleet.replace)
    await load.burst(20, stop_token_ids=range(3, 300))
    fleet.settle()
    check_frontends(load, fleet)
    return load


async def check_engines_over_a_death(load: MeteredLoad, fleet: Fleet) -> None:
    """Of an engine that dies idle nothing is lost: what it and its follower have counted is all there was."""
    told_before, counted_before = engine_totals(fleet.recorded), engine_counts(load)
    await load.burst(20, stop_token_ids=range(3, 300))
    fleet.settle()
    # Idle, and scraped since.
    await asyncio.to_thread(fleet.replace)
    await load.burst(20, stop_token_ids=range(3, 300))
    fleet.settle()
    counted, told = engine_counts(load), engine_totals(fleet.recorded)
    assert counted["prompt_tokens_total"] > counted_before["prompt_tokens_total"]
    assert {name: told[name] - told_before[name] for name in told} == {
        name: counted[name] - counted_before[name] for name in counted
    }


async def end_in_every_other_way(load: MeteredLoad, fleet: Fleet) -> None:
    """Engines full of long requests: some wait and are cancelled or time out, some are aborted, some lose theirs."""
    occupants = await load.occupy(2 * MAX_NUM_SEQS)
    waiting = [load.send(make_request(40, 41 + n, max_tokens=5)) for n in range(6)]
    timed_out = [load.send(make_request(50, 51 + n, max_tokens=5, queue_timeout_ms=50)) for n in range(4)]
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(caller.accepted.wait() for caller in waiting), *(caller.task for caller in timed_out))
        await asyncio.to_thread(check_full, fleet, len(waiting))
        await asyncio.gather(*(caller.cancel() for caller in waiting))
        # Their engines know, before an end of others makes room for them.
        await asyncio.to_thread(wait_until_waiting, fleet, 0)
        await asyncio.gather(*(caller.abort() for caller in occupants if caller.engine_id == STAYING))
        dying = [caller for caller in occupants if caller.engine_id == DYING]
        assert dying
        await asyncio.to_thread(fleet.engines[DYING].kill)
        await asyncio.gather(*(caller.task for caller in dying))


def check_full(fleet: Fleet, num_waiting: int) -> None:
    """In the middle of the load: every place is taken, the others wait, and no counter goes down."""

    wait_until_waiting(fleet, num_waiting)
    before, after = scraped(fleet), scraped(fleet)
    for earlier, later in zip(before.all, after.all, strict=True):
        later.check_against(engine_core.metrics.ROWS)
        assert later.total("vllm:num_requests_running") == MAX_NUM_SEQS
        assert 0 < later.total("vllm:kv_cache_usage_perc") <= 1
        assert earlier.counters.keys() <= later.counters.keys()
        assert all(value <= later.counters[series] for series, value in earlier.counters.items())
    assert after.total("stepwire_engine_core_requests_waiting_by_reason", reason="capacity") == num_waiting
    assert max(one.total("stepwire_engine_core_oldest_waiting_seconds") for one in after.all) > 0


def scraped(fleet: Fleet) -> Scrapes:
    return Scrapes(engine.metrics_port for engine in fleet.engines.values())


def wait_until_waiting(fleet: Fleet, num: int) -> None:
    """So many requests wait in the engines."""
    wait_until(lambda: scraped(fleet).total("vllm:num_requests_waiting") == num, f"{num} requests wait", TIMEOUT_S)


def engine_totals(source: Totals) -> dict[str, float]:
    names = ("prompt_tokens_total", "generation_tokens_total", *(f"request_{name}_seconds_count" for name in INTERVALS))
    return {name: source.total(f"stepwire_engine_core_{name}") for name in names}


def engine_counts(load: MeteredLoad) -> dict[str, float]:
    """The same as the callers know it, as long as no request was cut: of those they get less than was generated."""
    counts = load.counts
    tokens = {
        "prompt_tokens_total": counts.num_engine_prompt_tokens,
        "generation_tokens_total": counts.num_output_tokens,
    }
    return {**tokens, **{f"request_{name}_seconds_count": counts.num_choices for name in INTERVALS}}


def check_engines(load: MeteredLoad, fleet: Fleet) -> None:
    """While nothing has died or was cut: both services agree with the callers."""
    scrapes = scraped(fleet)
    assert engine_totals(scrapes) == engine_totals(fleet.recorded) == engine_counts(load)
    sent = scrapes.total("stepwire_engine_core_stream_frames_total", direction="in", kind="add")
    assert 0 < sent <= load.counts.num_submitted
    for source, name in product((scrapes, fleet.recorded), ("requests_aborted", "requests_rejected", "request_errors")):
        assert source.by(f"stepwire_engine_core_{name}_total", "reason") == {}, name
    for scrape in scrapes.all:
        assert scrape.total("stepwire_engine_core_steps_total") > 0
        phases = scrape.by("stepwire_engine_core_step_phase_seconds_count", "phase")
        assert phases["execute"] == scrape.total("stepwire_engine_core_steps_total")


def check_frontends(load: MeteredLoad, fleet: Fleet) -> None:
    for source in (Scrapes(one.metrics_port for one in fleet.frontends), fleet.recorded):
        check_frontends_in(source, load, fleet)
    for prefix, gauges in (("stepwire_engine_core", ENGINE_GAUGES), ("stepwire_frontend", FRONTEND_GAUGES)):
        assert {name: fleet.recorded.now(f"{prefix}_{name}") for name in gauges} == dict.fromkeys(gauges, 0)


def check_frontends_in(source: Totals, load: MeteredLoad, fleet: Fleet) -> None:
    counts, prefix = load.counts, "stepwire_frontend_"
    assert set(counts.ends) >= {"stop", "length", "abort", "error"}
    for name in (f"{prefix}requests_finished_total", "vllm:request_success_total"):
        assert source.by(name, "finished_reason") == counts.ends, name
    assert source.by(f"{prefix}requests_rejected_total", "reason") == counts.rejected
    assert set(counts.aborted) == {"client_cancelled", "requested"}
    assert source.by(f"{prefix}requests_aborted_total", "reason") == counts.aborted
    for name in (f"{prefix}http_requests_total", "http_requests_total"):
        assert source.by(name, "handler") == counts.http
        assert source.by(name, "status") == {"200": counts.http.total()}
    assert source.total(f"{prefix}request_prompt_tokens_sum") == counts.num_prompt_tokens
    assert source.total(f"{prefix}request_generation_tokens_sum") == counts.num_output_tokens
    assert source.total(f"{prefix}request_choices_sum") == counts.num_choices
    for name in REQUEST_HISTOGRAMS:
        assert source.total(f"{prefix}{name}_count") == counts.num_submitted, name
    assert source.total(f"{prefix}time_to_first_token_seconds_count") == counts.num_with_tokens
    calls = {"grpc_method": STREAM}
    handled = {code: source.total(f"{prefix}rpcs_handled_total", grpc_code=code, **calls) for code in counts.codes}
    assert handled == counts.codes
    for name in ("rpcs_started_total", "rpc_duration_seconds_count"):
        assert source.total(f"{prefix}{name}", **calls) == sum(counts.codes.values()), name
    assert source.total(f"{prefix}rpc_messages_total", direction="in", **calls) == sum(counts.codes.values())
    num_seen = fleet.num_deaths * len(fleet.frontends)
    assert source.by(f"{prefix}engine_deaths_total", "kind") == {"transport": num_seen}
    assert source.by(f"{prefix}engine_reconnects_total", "result") == {"new_boot": num_seen}
    for name in ("admission_seconds_count", "output_processing_seconds_count", "engine_ping_seconds_count"):
        assert source.total(f"{prefix}{name}") > 0, name


def wait_idle(fleet: Fleet) -> None:
    """Every gauge of work is back at 0, and all that is served is what is declared."""
    for services, gauges, prefix, rows in (
        (fleet.engines.values(), ENGINE_GAUGES, "stepwire_engine_core", engine_core.metrics.ROWS),
        (fleet.frontends, FRONTEND_GAUGES, "stepwire_frontend", frontend.metrics.ROWS),
    ):
        for service in services:
            names = [f"{prefix}_{name}" for name in gauges]
            wait_until(lambda s=service, n=names: not any(map(Scrape(s.metrics_port).total, n)), "no work", TIMEOUT_S)
            for accept in ("text/plain", OPENMETRICS):
                Scrape(service.metrics_port, accept).check_against(rows)
