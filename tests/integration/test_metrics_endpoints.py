"""What engines and frontends serve to scrapers and pickers: formats, aliases, the mirror."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import Metric

from engine_core.metrics import ROWS as ENGINE_ROWS
from fakes.fake_engine import FakeEngine
from frontend.metrics import MIRROR_ROWS
from frontend.metrics import ROWS as FRONTEND_ROWS
from running_engine import engine_request, running_engine
from running_frontend import SERVING, request, running_frontend
from scraped import OPENMETRICS, Scrape


@pytest.mark.slow
def test_an_engine_serves_what_is_declared_and_a_picker_finds_what_it_reads() -> None:
    with running_engine("--engine-id", "engine-0", "--block-size", "16", "--num-blocks", "300") as engine:
        # From the start, with 0.
        Scrape(engine.metrics_port).check_against(ENGINE_ROWS)
        stream = engine.connect()
        stream.until(lambda frame: frame.HasField("ready"))
        stream.add(engine_request(1, [5, 6, 7], max_tokens=5))
        stream.until_finished(1)
        stream.dump_state()
        engine.wait_for_metric(r"generation_tokens_total\{.*\}", 5)
        for accept in ("text/plain", OPENMETRICS):
            scrape = Scrape(engine.metrics_port, accept)
            scrape.check_against(ENGINE_ROWS)
            check_picker(scrape, {"model_name": "fake", "engine": "engine-0"}, block_size="16", num_gpu_blocks="300")
        assert scrape.total("vllm:prompt_tokens_total") == 3
        assert scrape.total("stepwire_engine_core_utility_calls_total", call="dump_state", code="OK") == 1
        assert scrape.total("stepwire_engine_core_session_events_total", event="opened") == 1
        assert scrape.total("stepwire_engine_core_stream_bytes_total", direction="out", kind="outputs") > 0
        assert scrape.total("stepwire_engine_core_build_info") == 1
        assert scrape.total("stepwire_engine_core_config_info", max_num_seqs="128", scheduling_policy="fair") == 1
        assert scrape.total("process_resident_memory_bytes") > 0


@pytest.mark.slow
def test_without_aliases_an_engine_serves_its_own_names_alone() -> None:
    with running_engine("--metrics-alias", "none") as engine:
        names = Scrape(engine.metrics_port).families
        assert "stepwire_engine_core_requests_running" in names
        assert not [name for name in names if name.startswith("vllm:")]


async def test_a_frontend_mirrors_its_engines_for_pickers(tokenizer_dir: Path, tmp_path: Path) -> None:
    fakes = [FakeEngine(tokenizer_dir, engine_id=f"fake-{n}") for n in range(2)]
    async with fakes[0].running(), fakes[1].running():
        endpoints = [fake.endpoint for fake in fakes]
        async with running_frontend(*endpoints, cache_dir=tmp_path / "cache", metrics_mirror_engines=True) as running:
            await running.wait_for_health(SERVING)
            pool = running.process.frontend.pool
            await running.wait_until(lambda: sum(one.is_attached for one in pool.connections) == 2)
            for number, connection in enumerate(pool.connections):
                connection.load = type(connection.load)(
                    running=3 + number, waiting=5, waiting_deferred=2, kv_blocks_used=10, kv_blocks_total=40
                )
            scrape = await asyncio.to_thread(Scrape, running.process.metrics_port)
            blocks = str(fakes[0].ready.num_blocks)
            for name in ("fake-0", "fake-1"):
                labels = {"model_name": "fake-model", "engine": name}
                check_picker(scrape, labels, block_size="16", num_gpu_blocks=blocks)
            assert scrape.total("vllm:num_requests_running", engine="fake-1") == 4
            assert scrape.total("vllm:num_requests_waiting_by_reason", engine="fake-0", reason="capacity") == 3
            assert scrape.total("vllm:kv_cache_usage_perc", engine="fake-0") == 0.25
            scrape.check_against((*FRONTEND_ROWS, *MIRROR_ROWS))


async def test_a_frontend_serves_what_is_declared_and_no_mirror_unless_asked(frontend, engine) -> None:
    await frontend.stream(request(max_tokens=3)).rest()
    for accept in ("text/plain", OPENMETRICS):
        scrape = await asyncio.to_thread(Scrape, frontend.process.metrics_port, accept)
        scrape.check_against(FRONTEND_ROWS)
    assert "vllm:num_requests_running" not in scrape.families
    assert scrape.total("stepwire_frontend_config_info", max_concurrent_requests="1024") == 1
    assert scrape.total("vllm:request_success_total", finished_reason="length") == 1
    assert scrape.total("vllm:e2e_request_latency_seconds_count") == 1
    assert scrape.total("stepwire_frontend_tokenize_seconds_count") == 1
    assert scrape.total("stepwire_frontend_output_processing_seconds_count") > 0
    assert scrape.total("stepwire_frontend_stream_frames_total", direction="out", kind="add") == 1


async def test_a_request_that_goes_before_it_has_reached_an_engine_ends_once_too(frontend, monkeypatch) -> None:
    entered = asyncio.Event()

    async def never(work: object) -> None:
        entered.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(frontend.process.frontend.model.input_processor, "in_thread", never)
    stream = frontend.stream(request())
    reading = asyncio.create_task(stream.next())
    await asyncio.wait_for(entered.wait(), 20)
    stream.call.cancel()
    await asyncio.wait({reading})
    await frontend.wait_idle()
    nowhere = {"model_name": "fake-model", "engine_id": ""}
    assert frontend.metric("requests_finished_total", finished_reason="abort", **nowhere) == 1
    assert frontend.metric("request_duration_seconds_count", **nowhere) == 1


async def test_an_engine_that_has_started_anew_is_a_reconnect_to_a_new_boot(frontend, engine) -> None:
    await engine.kill()
    await frontend.wait_until(lambda: not frontend.process.frontend.is_serving)
    await engine.start(engine.port)
    await frontend.wait_for_health(SERVING)
    assert frontend.metric("engine_reconnects_total", engine_id="fake-0", result="new_boot") == 1
    assert frontend.metric("engine_reconnects_total", engine_id="fake-0", result="expired") == 0


def check_picker(scrape: Scrape, labels: dict[str, str], **config: str) -> None:
    """What the endpoint picker of the Kubernetes inference gateway looks for, as it looks for it."""
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        family = scrape.families[name]
        assert family.type == "gauge"
        [value] = [sample.value for sample in family.samples if sample.labels == labels]
        assert value >= 0
    info: Metric = scrape.families["vllm:cache_config_info"]
    [found] = [sample for sample in info.samples if sample.labels["engine"] == labels["engine"]]
    assert found.value == 1
    assert config.items() <= found.labels.items()
