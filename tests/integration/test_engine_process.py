"""The engine as a process: ports, signals, owners, the watchdog, and 0 % CPU when idle."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import time
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_core.server import MAX_STREAMS
from fakes.fake_executor import HANG_TOKEN, SLOW_TOKEN
from running_engine import TIMEOUT_S, EngineStream, RunningEngine, engine_request, running_engine
from stepwire.engine.v1 import engine_core_pb2 as pb

SERVICE = "stepwire.engine.v1.EngineCoreService"


def start_slow_request(engine: RunningEngine, max_tokens: int) -> EngineStream:
    stream = engine.connect()
    stream.add(engine_request(1, [SLOW_TOKEN] * 3, max_tokens))
    stream.until(lambda _: stream.tokens.get(1))
    return stream


@pytest.mark.regression(25)
def test_sigterm_drains_running_answers_and_refuses_new_ones() -> None:
    with running_engine() as engine:
        stream = start_slow_request(engine, 500)
        engine.terminate()
        notice = stream.until(lambda frame: frame.HasField("shutdown")).shutdown
        assert notice.requests_in_flight == 1
        assert 0 < notice.drain_remaining_ms <= 30_000
        stream.add(engine_request(2, [10]))
        stream.until_finished(2)
        assert stream.finishes[2].reason == pb.ENGINE_FINISH_REASON_REJECTED
        assert stream.finishes[2].error.reason == "DRAINING"
        assert stream.rest() is grpc.StatusCode.OK
        assert stream.finishes[1].reason == pb.ENGINE_FINISH_REASON_LENGTH
        assert len(stream.tokens[1]) == 500
        assert engine.wait() == 0
        assert "ENGINE_CORE_DEAD" not in "".join(engine.log)


@pytest.mark.regression(22)
@pytest.mark.parametrize("flags", [["--drain-timeout-s", "0"], []])
def test_no_drain_and_a_second_signal_abort_and_deliver_the_aborts(flags: list[str]) -> None:
    with running_engine(*flags) as engine:
        stream = start_slow_request(engine, 4000)
        engine.terminate()
        stream.until(lambda frame: frame.HasField("shutdown"))
        if not flags:
            engine.terminate()
        assert stream.rest() is grpc.StatusCode.OK
        assert stream.finishes[1].reason == pb.ENGINE_FINISH_REASON_ABORTED
        assert engine.wait() == 0


def test_connect_during_a_drain_is_refused_with_the_reason() -> None:
    with running_engine() as engine:
        stream = start_slow_request(engine, 4000)
        engine.terminate()
        stream.until(lambda frame: frame.HasField("shutdown"))
        with pytest.raises(grpc.RpcError) as caught:
            engine.connect("late").next()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "DRAINING" in caught.value.details()


def test_sigint_of_an_idle_engine_is_a_clean_exit() -> None:
    with running_engine() as engine:
        stream = engine.connect()
        stream.next()
        engine.process.send_signal(signal.SIGINT)
        assert stream.rest() is grpc.StatusCode.OK
        assert engine.wait() == 0


def test_the_parents_end_is_the_engines_end() -> None:
    with running_engine("--owner", "parent") as engine:
        stream = start_slow_request(engine, 4000)
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        assert stream.rest() is grpc.StatusCode.OK
        assert stream.finishes[1].reason == pb.ENGINE_FINISH_REASON_ABORTED
        assert engine.wait() == 0


def test_an_orphan_ends_when_its_owner_is_the_session() -> None:
    with running_engine("--owner", "session", "--orphan-timeout-s", "3", "--stall-warn-s", "0.4") as engine:
        stream = engine.connect()
        stream.next()
        stream.call.cancel()
        assert engine.wait() == 0


@pytest.mark.regression(25)
def test_a_hung_step_is_seen_and_then_ends_the_engine() -> None:
    with running_engine("--stall-warn-s", "0.3", "--step-timeout-s", "5") as engine:
        watch = health_pb2_grpc.HealthStub(engine.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        while next(watch).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        stream = engine.connect()
        stream.add(engine_request(1, [HANG_TOKEN]))
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        stream.send(ping=pb.Ping(nonce=1))
        assert stream.until(lambda frame: frame.HasField("pong")).pong.step_age_ms > 0
        stream.rest()
        dead = stream.frames[-1].engine_dead
        assert dead.cause == pb.ENGINE_DEATH_CAUSE_STEP_TIMEOUT
        assert list(dead.lost_handles) == [1]
        assert engine.wait() == 1


@pytest.mark.parametrize("owner", ["none", "parent"])
def test_a_hung_step_does_not_keep_an_engine_that_is_told_to_end(owner: str) -> None:
    with running_engine("--owner", owner, "--drain-timeout-s", "0.2", "--stall-warn-s", "0.4") as engine:
        stream = engine.connect()
        stream.add(engine_request(1, [HANG_TOKEN]))
        stream.until(lambda frame: frame.outputs.outputs)
        if owner == "parent":
            assert engine.process.stdin is not None
            engine.process.stdin.close()
        else:
            engine.terminate()
        stream.until(lambda frame: frame.HasField("shutdown"))
        stream.rest()
        assert stream.frames[-1].engine_dead.cause == pb.ENGINE_DEATH_CAUSE_STEP_TIMEOUT
        assert engine.wait() == 1


def test_loading_does_not_count_as_being_an_orphan() -> None:
    flags = ["--owner", "session", "--orphan-timeout-s", "2", "--stall-warn-s", "0.4", "--fake-load-s", "3"]
    with running_engine(*flags) as engine:
        stream = engine.connect()
        assert stream.next().HasField("ready")
        stream.add(engine_request(1, [10] * 3, 2))
        stream.until_finished(1)


@pytest.mark.regression(25)
def test_connect_waits_for_the_model_and_is_told_when_it_fails() -> None:
    with running_engine("--fake-load-s", "3", "--fake-load-error", "no such model") as engine:
        with pytest.raises(grpc.RpcError) as caught:
            engine.connect().next()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no such model" in caught.value.details()
        assert engine.wait() == 1
        assert "Traceback" not in "".join(engine.log)


@pytest.mark.regression(22)
def test_sigterm_while_the_model_loads_is_a_clean_exit() -> None:
    with running_engine("--fake-load-s", "600") as engine:
        engine.terminate()
        assert engine.wait() == 0


def test_a_model_that_loads_too_long_ends_the_engine() -> None:
    with running_engine("--fake-load-s", "600", "--ready-timeout-s", "0.5") as engine:
        assert engine.wait() == 1
        assert "--ready-timeout-s" in "".join(engine.log)


def test_an_open_watch_does_not_hold_up_the_exit_and_a_third_signal_changes_nothing() -> None:
    with running_engine() as engine:
        watch = health_pb2_grpc.HealthStub(engine.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        next(watch)
        stream = start_slow_request(engine, 4000)
        # One at a time: equal signals that are pending together arrive as one.
        engine.terminate()
        stream.until(lambda frame: frame.HasField("shutdown"))
        engine.terminate()
        stream.until_finished(1)
        engine.terminate()
        assert stream.rest() is grpc.StatusCode.OK
        assert stream.finishes[1].reason == pb.ENGINE_FINISH_REASON_ABORTED
        assert engine.wait() == 0


def test_streams_beyond_the_limit_are_refused_and_health_still_answers() -> None:
    with running_engine() as engine:
        silent = [engine.stub.Connect(iter(queue.SimpleQueue().get, None)) for _ in range(MAX_STREAMS)]
        health = health_pb2_grpc.HealthStub(engine.channel)
        refused = None
        while refused is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            with pytest.raises(grpc.RpcError) as caught:
                engine.stub.Connect(iter([pb.ConnectRequest()])).next()
            refused = caught.value.code()
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=30).status
        for call in silent:
            call.cancel()


def test_a_second_engine_on_the_same_port_fails_with_one_sentence() -> None:
    with running_engine() as engine:
        second = subprocess.run(
            [sys.executable, "-m", "engine_core", "--port", str(engine.port), "--metrics-port", "0"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 1
        assert f"127.0.0.1:{engine.port}" in second.stderr
        assert "in use" in second.stderr
        assert "Traceback" not in second.stderr


def test_an_idle_engine_uses_no_cpu() -> None:
    with running_engine() as engine:
        engine.connect().next()
        # What the start has left to do may take a while. The monitor wakes once a second; a loop that polls would use
        # a whole core, for ever.
        give_up = time.monotonic() + TIMEOUT_S
        while (used := cpu_seconds_in_two(engine)) > 0.1:
            assert time.monotonic() < give_up, f"{used} s in two seconds"


def cpu_seconds_in_two(engine: RunningEngine) -> float:
    before, started = cpu_seconds(engine), time.monotonic()
    while time.monotonic() - started < 2:
        select_nothing()
    return cpu_seconds(engine) - before


def cpu_seconds(engine: RunningEngine) -> float:
    with open(f"/proc/{engine.process.pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def select_nothing() -> None:
    signal.sigtimedwait([], 0.1)


def test_metrics_and_probes_are_served() -> None:
    with running_engine() as engine:
        stream = engine.connect()
        stream.add(engine_request(1, [10] * 20, 5))
        stream.until_finished(1)
        engine.wait_for_metric(r"generation_tokens_total\{.*\}", 5)
        base = f"http://127.0.0.1:{engine.metrics_port}"
        text = get(f"{base}/metrics")
        labels = (
            f'{{engine_id="{engine.stub.GetEngineInfo(pb.GetEngineInfoRequest()).ready.engine_id}",model_name="fake"}}'
        )
        assert f"stepwire_engine_core_generation_tokens_total{labels} 5.0" in text
        assert f"stepwire_engine_core_requests_running{labels} 0.0" in text
        assert get(f"{base}/readyz") == get(f"{base}/healthz") == "ok\n"


def get(url: str) -> str:
    with urllib.request.urlopen(url) as response:
        return response.read().decode()
