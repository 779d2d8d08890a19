"""Metrics of the engine that a flag turns on: served with the flag alone, and right."""

from __future__ import annotations

from engine_core.metrics import ROWS
from fakes.fake_executor import NAN_TOKEN
from running_engine import engine_request, running_engine
from scraped import Scrape

CORRUPTED = r"corrupted_requests_total\{.*\}"


def test_costs_are_estimated_and_corrupted_requests_counted_on_demand() -> None:
    with running_engine("--check-nan", "--mfu-metrics", "--no-enable-prefix-caching") as engine:
        assert engine.metric(CORRUPTED) == 0
        stream = engine.connect()
        stream.add(engine_request(4, [5, 6, 7], max_tokens=1))
        stream.until_finished(4)
        stream.dump_state()
        scrape = Scrape(engine.metrics_port)
        scrape.check_against(ROWS)
        # As FAKE_WORK says: three tokens that see 1, 2 and 3 keys, of which one is sampled from.
        assert scrape.total("vllm:estimated_flops_per_gpu_total") == 2 * (100 * 3 + 10) + 2 * 2 * 6
        assert scrape.total("vllm:estimated_read_bytes_per_gpu_total") == 400 + 40 + 4 * 3
        assert scrape.total("vllm:estimated_write_bytes_per_gpu_total") == 4 * 3
        requests = [engine_request(n, [NAN_TOKEN, n], max_tokens=4) for n in (1, 2)]
        stream.add(*requests, engine_request(3, [5, 6], max_tokens=4))
        stream.until_finished(1, 2, 3)
        engine.wait_for_metric(r"generation_tokens_total\{.*\}", 13)
        assert engine.metric(CORRUPTED) == 2
        engine.terminate()
        assert engine.wait() == 0
    told = [line for line in engine.log if "computes NaN" in line]
    # The second is a repeat, told when the process ends.
    assert len(told) == 2
    assert "2 times by now" in told[1]
