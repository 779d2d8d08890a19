"""Metrics of the engine that a flag turns on: served with the flag alone, and right."""

from __future__ import annotations

from fakes.fake_executor import NAN_TOKEN
from running_engine import engine_request, running_engine

CORRUPTED = r"corrupted_requests_total\{.*\}"


def test_corrupted_requests_are_counted_and_named_in_the_log_on_demand() -> None:
    with running_engine("--check-nan") as engine:
        assert engine.metric(CORRUPTED) == 0
        stream = engine.connect()
        requests = [engine_request(n, [NAN_TOKEN, n], max_tokens=4) for n in (1, 2)]
        stream.add(*requests, engine_request(3, [5, 6], max_tokens=4))
        stream.until_finished(1, 2, 3)
        stream.dump_state()
        assert engine.metric(CORRUPTED) == 2
        assert engine.metric(r"generation_tokens_total\{.*\}") == 12
        engine.terminate()
        assert engine.wait() == 0
    told = [line for line in engine.log if "computes NaN" in line]
    # The second is a repeat, told when the process ends.
    assert len(told) == 2
    assert "2 times by now" in told[1]
