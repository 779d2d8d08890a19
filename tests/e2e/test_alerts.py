"""Each alert fires by the real fault: services around a fake model, a real Prometheus, rules whose times are short."""

from __future__ import annotations

import datetime
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import grpc
import pytest
import trustme

from fakes.fake_executor import HANG_TOKEN, SLOW_TOKEN
from fakes.small_tokenizer import byte_level_backend, write_model_dir
from free_ports import free_port
from running_prometheus import HOW, RULES, RunningPrometheus, hurried_rules, running_prometheus, wait_until
from running_stack import SERVING, Frontend, Service, Stack, running_stack
from skips import require_program
from stepwire.v1 import common_pb2, generation_service_pb2_grpc
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

FAKE_ENGINE = "fakes.fake_engine_process"
TIMEOUT_S = 60.0
# What a machine that is busy with other things rightly brings about.
OF_THE_MACHINE = {"StepwireEventLoopLag", "StepwireGCPause"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPrometheus]:
    program = require_program("prometheus", how=HOW)
    with running_prometheus(program, tmp_path_factory.mktemp("prometheus"), hurried_rules()) as server:
        yield server


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_model_dir(directory, byte_level_backend(), config={"eos_token_id": 0})


class Place:
    """A stack whose services are all scraped."""

    def __init__(self, stack: Stack, server: RunningPrometheus, model_dir: Path) -> None:
        self._stack = stack
        self._model_dir = model_dir
        self.server = server
        # Alerts that began earlier are of other tests.
        self.since = datetime.datetime.now(datetime.UTC).replace(microsecond=0)

    def engine(self, *flags: str, port: int = 0, package: str = FAKE_ENGINE) -> Service:
        return self._stack.engine("--ping-interval-ms=500", *flags, port=port, package=package)

    def frontend(self, engine: Service, *flags: str, package: str = "frontend") -> Frontend:
        own = ("--tokenizer", str(self._model_dir), *flags)
        frontend = self._stack.frontend(engine, flags=own, package=package)
        self.server.scrape([frontend.metrics_port], [engine.metrics_port])
        return frontend

    def served(self, engine: Service, *flags: str, package: str = "frontend") -> Frontend:
        frontend = self.frontend(engine, *flags, package=package)
        frontend.wait_for_health(SERVING)
        # A counter whose first sample is above 0 has not grown.
        for port in (frontend.metrics_port, engine.metrics_port):
            scraped = f'min_over_time(up{{instance="127.0.0.1:{port}"}}[1m])'
            wait_until(lambda scraped=scraped: self.server.value(scraped, time.time()) is not None, scraped)
        return frontend


@pytest.fixture
def place(server: RunningPrometheus, model_dir: Path, tmp_path: Path) -> Iterator[Place]:
    with running_stack(model_dir, tmp_path) as stack:
        yield Place(stack, server, model_dir)
    # What the next test sees must be its own.
    server.scrape([], [])


def request(*token_ids: int, max_tokens: int = 60, logprobs: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=token_ids),
        stop=common_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=common_pb2.OutputOptions(logprobs=logprobs),
    )


def start(frontend: Frontend, *requests: GenerateRequest) -> list[grpc.Call]:
    return [frontend.generation.GenerateStream(one, timeout=TIMEOUT_S) for one in requests]


def finish(calls: list[grpc.Call]) -> None:
    for call in calls:
        with suppress(grpc.RpcError):
            list(call)  # type: ignore[call-overload]


def wait_for_alerts(place: Place, *names: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    """All of them fire, if not at the same time; and their texts have no fault."""
    server, since = place.server, place.since
    seen: dict[str, dict[str, str]] = {}

    def have_fired() -> bool:
        meanwhile()
        seen.update({alert["alertname"]: alert for alert in server.alerts(since)})
        return set(names) <= seen.keys()

    with suppress(AssertionError):
        wait_until(have_fired, "")
    assert set(names) <= seen.keys(), f"{set(names) - seen.keys()} did not fire, {set(seen)} did"
    for name in names:
        assert "<" not in seen[name]["summary"] + seen[name]["description"]


def test_healthy_services_fire_nothing(place: Place, server: RunningPrometheus) -> None:
    # Steps as slow as a real model's: an engine that steps in no time rightly finds every frontend behind it.
    frontend = place.served(place.engine("--fake-slow-step-s=0.02"))
    for number in range(20):
        finish(start(frontend, *(request(SLOW_TOKEN, 6, number, max_tokens=20) for _ in range(4))))
    wait_until(
        lambda: "StepwireMetricsAbsent" not in {alert["alertname"] for alert in server.alerts(place.since)}, "scraped"
    )
    finish(start(frontend, *(request(SLOW_TOKEN, 6, 7, number, max_tokens=20) for number in range(40))))
    fired = {alert["alertname"] for alert in server.alerts(place.since)}
    assert fired <= OF_THE_MACHINE


def test_overload(place: Place) -> None:
    # 48 blocks: twelve requests of four, and each wants a fifth soon. Steps take longer than the objective.
    blocks = ("--num-blocks=49", "--block-size=4", "--max-model-len=-1")
    limits = (*blocks, "--max-num-seqs=12", "--max-queued-requests=8")
    frontend = place.served(place.engine(*limits, "--fake-slow-step-s=0.25"))
    numbers, calls = count(10), []

    def ask_for_more() -> None:
        calls.extend(
            start(frontend, *(request(SLOW_TOKEN, *[next(numbers) % 400] * 12, max_tokens=24) for _ in range(4)))
        )

    wait_for_alerts(
        place,
        *("StepwireQueueGrowing", "StepwireRejecting", "StepwireTTFTHigh", "StepwireITLHigh"),
        *("StepwireKVPressure", "StepwirePreemptionStorm"),
        meanwhile=ask_for_more,
    )
    for call in calls:
        call.cancel()


def test_a_dead_engine(place: Place, server: RunningPrometheus) -> None:
    engine = place.engine()
    frontend = place.served(engine)
    finish(start(frontend, request(5)))
    wait_until(lambda: server.value("sum(stepwire:engine_deaths:total)", time.time()) == 0, "it is scraped")
    wait_until(lambda: bool(server.value("sum(stepwire_engine_core_steps_total)", time.time())), "it is scraped")
    engine.kill()
    wait_for_alerts(
        place,
        *("StepwireEngineDown", "StepwireNoEngineServing", "StepwireEngineDied", "StepwireScrapeFailing"),
        *("StepwireMetricsAbsent", "StepwireHighErrorRatio"),
        meanwhile=lambda: finish(start(frontend, request(5))),
    )


def test_an_engine_that_is_started_again_and_again(place: Place) -> None:
    port = free_port()
    engine = place.engine("--engine-id=e", port=port)
    frontend = place.served(engine)
    for _ in range(5):
        engine.kill()
        wait_until(lambda: frontend.metric("stepwire_frontend_engine_up") == 0, "the death is known")
        engine = place.engine("--engine-id=e", port=port)
        wait_until(lambda: frontend.metric("stepwire_frontend_engine_up") == 1, "it is back")
    wait_for_alerts(place, "StepwireSessionFlapping")


def test_a_step_that_hangs(place: Place) -> None:
    frontend = place.served(place.engine())
    calls = start(frontend, request(HANG_TOKEN))
    wait_for_alerts(place, "StepwireEngineStalled")
    calls[0].cancel()


def test_callers_that_do_not_read(place: Place) -> None:
    flags = ("--slow-client-bytes=20000", "--slow-client-timeout-s=1")
    frontend = place.served(place.engine(), *flags)
    # What the transport takes unread is soon used up, and then output piles up in the frontend.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    with grpc.insecure_channel(f"127.0.0.1:{frontend.port}", options) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        requests = [request(number, max_tokens=4000, logprobs=20) for number in range(40, 46)]
        unread = [stub.GenerateStream(one, timeout=TIMEOUT_S) for one in requests]
        wait_for_alerts(place, "StepwireSlowClients")
        finish(unread)


def test_a_frontend_that_does_not_read(place: Place) -> None:
    frontend = place.served(place.engine())
    calls = start(frontend, *(request(*range(40, 60), number, max_tokens=4000) for number in range(64)))
    for call in calls:
        next(call)  # type: ignore[call-overload]
    frontend.signal(signal.SIGSTOP)
    wait_for_alerts(place, "StepwireSlowFrontend", "StepwireScrapeFailing")
    frontend.signal(signal.SIGCONT)


def test_an_unwell_frontend(place: Place) -> None:
    frontend = place.served(place.engine(), package="fakes.unwell_frontend_process")
    wait_for_alerts(
        place,
        *("StepwireEventLoopLag", "StepwireOutputErrors", "StepwireGCPause", "StepwireMemoryGrowth"),
        meanwhile=lambda: finish(start(frontend, request(5))),
    )


def test_an_unwell_engine(place: Place) -> None:
    frontend = place.served(place.engine(package="fakes.unwell_engine_process"))
    prompts = iter(range(1, 400))
    wait_for_alerts(
        place,
        *("StepwireHashCollision", "StepwireBatchGap"),
        meanwhile=lambda: finish(
            start(frontend, request(*range(10, 50), next(prompts)), request(*[next(prompts)] * 40))
        ),
    )


def test_a_certificate_that_ends_soon(place: Place, tmp_path: Path) -> None:
    tomorrow = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    certificate = trustme.CA().issue_cert("127.0.0.1", not_after=tomorrow)
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    place.frontend(
        place.engine(), "--tls-cert-file", str(tmp_path / "cert.pem"), "--tls-key-file", str(tmp_path / "key.pem")
    )
    wait_for_alerts(place, "StepwireCertificateExpiry")


def test_no_alert_is_left_out() -> None:
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text(encoding="utf-8")))
    assert alerts <= set(re.findall(r'"(Stepwire\w+)"', Path(__file__).read_text(encoding="utf-8")))
