"""SIGTERM at any moment (engine-semantics.md §14, row 22): the process goes, and what was taken in is answered."""

from __future__ import annotations

import random
import threading

import grpc
import pytest

from fakes.fake_executor import SLOW_TOKEN
from running_engine import EngineStream, RunningEngine, engine_request, running_engine

NUM_REQUESTS = 20
LOAD_S = 0.3
DRAIN_S = 0.5


def requests_for(stream: EngineStream, rng: random.Random) -> None:
    """Some end by themselves within the drain, some can not."""
    for handle in range(1, NUM_REQUESTS + 1):
        prompt = [rng.choice([SLOW_TOKEN, 10]), *(rng.randint(3, 400) for _ in range(rng.randint(1, 60)))]
        stream.add(engine_request(handle, prompt, rng.choice([1, 5, 30, 2000])))


def terminate_after(delay_s: float, engine: RunningEngine) -> threading.Timer:
    timer = threading.Timer(delay_s, engine.terminate)
    timer.start()
    return timer


@pytest.mark.slow
@pytest.mark.regression(22)
@pytest.mark.parametrize("number", range(20))
def test_sigterm_at_a_random_moment(number: int) -> None:
    rng = random.Random(number)
    # Every fourth one meets the load, every second one is sent again.
    delay_s = rng.uniform(0, LOAD_S) if number % 4 == 0 else LOAD_S + rng.uniform(0, 1.0)
    is_repeated = number % 2 == 0
    with running_engine("--fake-load-s", str(LOAD_S), "--drain-timeout-s", str(DRAIN_S)) as engine:
        timers = [terminate_after(delay_s, engine)]
        if is_repeated:
            timers.append(terminate_after(delay_s + rng.uniform(0, 2 * DRAIN_S), engine))
        stream = engine.connect()
        requests_for(stream, rng)
        code = stream.rest()
        assert engine.wait() == 0
        for timer in timers:
            timer.join()
        log = "".join(engine.log)
        assert "ENGINE_CORE_DEAD" not in log
        assert "Traceback" not in log
        # UNAVAILABLE: it came before the engine served, and nothing was taken in.
        assert code is grpc.StatusCode.OK or not stream.tokens
        heard_of = {output.handle for frame in stream.frames for output in frame.outputs.outputs}
        assert set(stream.finishes) == heard_of | set(stream.tokens)


@pytest.mark.regression(22)
def test_signals_up_to_the_very_end_do_not_turn_a_clean_exit_into_a_kill() -> None:
    with running_engine("--drain-timeout-s", "0") as engine:
        stream = engine.connect()
        stream.add(engine_request(1, [SLOW_TOKEN] * 3, 4000))
        stream.until(lambda _: stream.tokens.get(1))
        pause = threading.Event()
        while engine.process.poll() is None:
            engine.terminate()
            pause.wait(0.001)
        stream.rest()
        assert engine.wait() == 0
