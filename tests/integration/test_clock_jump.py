"""The wall clock is set forward in the middle of a stream: no latency has the jump in it."""

from __future__ import annotations

import time

import pytest

from fakes.fake_engine import FakeEngine
from running_frontend import RunningFrontend, request
from stepwire.engine.v1 import engine_core_pb2 as pb

JUMP_S = 3600
LATENCIES = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_duration_seconds"),
    "request_time_per_output_token_seconds",
)


class WallClock:
    """That of the whole process; it can be set forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0
        seconds, nanoseconds = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: seconds() + self.ahead_s)
        monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + self.ahead_s * 1_000_000_000)


async def test_no_latency_has_a_jump_of_the_wall_clock_in_it(
    frontend: RunningFrontend, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    def pause_after_second(add: pb.EngineCoreRequest, index: int) -> None:
        if index == 1:
            engine.may_step.clear()

    clock = WallClock(monkeypatch)
    engine.may_step.clear()
    engine.fail = pause_after_second
    stream = frontend.stream(request(max_tokens=6))
    assert (await stream.next()).HasField("accepted")
    clock.ahead_s += JUMP_S
    engine.may_step.set()
    assert (await stream.next()).HasField("delta")
    await engine.wait_until(lambda: not engine.may_step.is_set())
    clock.ahead_s += JUMP_S
    engine.may_step.set()
    await stream.rest()
    await frontend.wait_idle()
    labels = {"model_name": "fake-model", "engine_id": "fake-0"}
    assert all(frontend.metric(f"{name}_count", **labels) > 0 for name in LATENCIES)
    sums = {name: frontend.metric(f"{name}_sum", **labels) for name in LATENCIES}
    assert all(0 <= value < 60 for value in sums.values()), sums
