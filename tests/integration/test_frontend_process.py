"""The frontend as a process: health, reflection, metrics, drain, exit codes."""

from __future__ import annotations

import asyncio
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fakes.fake_engine import FakeEngine
from frontend.server import SERVICE_NAMES
from running_frontend import (
    GENERATION,
    NOT_SERVING,
    SERVING,
    RunningFrontend,
    failure_of,
    request,
    running_frontend,
)
from stepwire.v1 import common_pb2, model_service_pb2, tokenization_service_pb2

Code = grpc.StatusCode


async def check(frontend: RunningFrontend, name: str) -> int:
    return (await frontend.health.Check(health_pb2.HealthCheckRequest(service=name))).status


async def test_health_follows_the_engine_and_the_process_stays_serving(tokenizer_dir, tmp_path):
    engine = FakeEngine(tokenizer_dir)
    await engine.start()
    await engine.stop()
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache") as running:
        assert await check(running, "") == SERVING
        for name in SERVICE_NAMES:
            assert await check(running, name) == NOT_SERVING
        watch = aiter(running.health.Watch(health_pb2.HealthCheckRequest(service=GENERATION)))
        seen = [(await anext(watch)).status]
        await engine.start(engine.port)
        seen.append((await anext(watch)).status)
        await engine.kill()
        seen.append((await anext(watch)).status)
        assert seen == [NOT_SERVING, SERVING, NOT_SERVING]
        assert await check(running, "") == SERVING


async def test_unknown_health_names(frontend: RunningFrontend):
    failure = await failure_of(check(frontend, "no.such.Service"))
    assert failure.code is Code.NOT_FOUND
    watch = frontend.health.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_reflection_lists_and_describes_the_services(frontend: RunningFrontend):
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=GENERATION),
    ]
    call = reflection_pb2_grpc.ServerReflectionStub(frontend.channel).ServerReflectionInfo(iter(requests))
    listed, described = [response async for response in call]

    names = {service.name for service in listed.list_services_response.service}
    assert {*SERVICE_NAMES, "grpc.health.v1.Health"} <= names
    assert any(b"GenerateStream" in file for file in described.file_descriptor_response.file_descriptor_proto)


async def fetch(port: int, path: str) -> tuple[int, str]:
    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(get)


async def test_metrics_endpoint(frontend: RunningFrontend, engine: FakeEngine):
    port = frontend.process.metrics_port
    assert (await fetch(port, "/healthz"))[0] == 200
    assert (await fetch(port, "/readyz"))[0] == 200
    assert (await fetch(port, "/nothing"))[0] == 404
    await frontend.generation.Generate(request())
    status, text = await fetch(port, "/metrics")
    assert status == 200
    assert 'stepwire_frontend_engine_up{engine_id="fake-0"} 1.0' in text
    assert 'rpcs_handled_total{grpc_code="OK",grpc_method="/stepwire.v1.GenerationService/Generate"} 1.0' in text
    assert 'requests_rejected_total{client_class="other",reason="KV_CAPACITY"} 0.0' in text
    await engine.kill()
    await frontend.wait_for_health(NOT_SERVING)
    assert (await fetch(port, "/readyz"))[0] == 503
    assert (await fetch(port, "/healthz"))[0] == 200


async def test_every_rpc_is_counted_with_its_code(frontend: RunningFrontend):
    await failure_of(frontend.generation.Generate(request(model="other")))
    await failure_of(frontend.channel.unary_unary("/no.such/Method")(b""))
    method = "/stepwire.v1.GenerationService/Generate"
    await frontend.wait_for_metric(1, "rpcs_handled_total", grpc_method=method, grpc_code="NOT_FOUND")
    assert frontend.metric("rpcs_started_total", grpc_method=method) == 1
    await frontend.wait_for_metric(1, "rpcs_handled_total", grpc_method="unknown", grpc_code="UNIMPLEMENTED")


async def test_models_and_server_info(frontend: RunningFrontend, engine: FakeEngine):
    listed = await frontend.models.ListModels(model_service_pb2.ListModelsRequest())
    (model,) = listed.models
    assert (model.id, model.max_model_len, model.vocab_size) == ("fake-model", 4096, 400)
    assert list(model.eos_token_ids) == [0]
    assert model.tokenizer_sha256 == engine.ready.tokenizer_sha256
    assert model.capabilities.resume
    info = await frontend.models.GetServerInfo(model_service_pb2.GetServerInfoRequest())
    (attached,) = info.engines
    assert (attached.engine_id, attached.state) == ("fake-0", common_pb2.ENGINE_STATE_RUNNING)
    assert attached.kv_cache_tokens == engine.ready.kv_cache_tokens
    assert info.instance_id == engine.hellos[0].session_id
    assert info.api_revision >= info.min_client_revision >= 1


async def test_tokenize_and_detokenize(frontend: RunningFrontend):
    texts = ["hello world", "", "café 😀"]
    tokenized = await frontend.tokenization.Tokenize(
        tokenization_service_pb2.TokenizeRequest(texts=texts, return_offsets=True)
    )
    assert list(tokenized.encodings[0].offset_starts) == [0, 5]
    assert list(tokenized.encodings[0].offset_ends) == [5, 11]
    sequences = [common_pb2.TokenIds(ids=encoding.token_ids) for encoding in tokenized.encodings]
    detokenized = await frontend.tokenization.Detokenize(
        tokenization_service_pb2.DetokenizeRequest(sequences=sequences)
    )
    assert list(detokenized.texts) == texts
    failure = await failure_of(
        frontend.tokenization.Detokenize(
            tokenization_service_pb2.DetokenizeRequest(sequences=[common_pb2.TokenIds(ids=[1, 400])])
        )
    )
    assert (failure.reason, failure.fields) == ("FIELD_INVALID", ["sequences[0].ids"])


async def test_drain_lets_requests_finish_and_refuses_new_ones(engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, cache_dir=tmp_path, drain_timeout_s=60) as running:
        await running.wait_for_health(SERVING)
        engine.may_step.clear()
        stream = running.stream(request(max_tokens=3))
        await stream.next()
        watch = running.health.Watch(health_pb2.HealthCheckRequest(service=GENERATION))
        statuses = aiter(watch)
        assert (await anext(statuses)).status == SERVING
        running.process.request_stop()
        assert (await anext(statuses)).status == NOT_SERVING
        await running.wait_until(lambda: running.process.frontend.is_draining)
        failure = await failure_of(running.generation.Generate(request()))
        assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "DRAINING")
        assert failure.retry_info.retry_delay.ToMilliseconds() > 0
        engine.may_step.set()

        assert (await stream.rest())[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
        # The open Watch does not hold the end up, and ends well.
        assert [response async for response in statuses] == []
        assert await watch.code() is Code.OK
        await running.run


async def test_not_ready_from_the_moment_a_stop_was_asked_for(engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, cache_dir=tmp_path, pre_stop_delay_s=600) as running:
        await running.wait_for_health(SERVING)
        port = running.process.metrics_port
        assert (await fetch(port, "/readyz"))[0] == 200
        running.process.request_stop()
        assert (await fetch(port, "/readyz"))[0] == 503
        assert (await fetch(port, "/healthz"))[0] == 200
        # Balancers may not have noticed yet.
        assert (await running.generation.Generate(request())).completions[0].text
        running.process.request_stop()
        await running.run


async def test_second_signal_ends_the_drain_with_what_was_delivered(engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, cache_dir=tmp_path, drain_timeout_s=600) as running:
        await running.wait_for_health(SERVING)
        stream = running.stream(request("a b c", max_tokens=1_000_000))
        while not (await stream.next()).HasField("delta"):
            pass
        engine.may_step.clear()
        running.process.request_stop()
        running.process.request_stop()
        failure = await stream.failure()
        assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "DRAINING")
        assert int(failure.info.metadata["tokens_emitted"]) > 0
        await running.run
    assert engine.goodbyes


async def start_process(tmp_path: Path, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "frontend", "--metrics-port", "0", "--admin-port", "0",
        "--http-port", "0", "--cache-dir", str(tmp_path / "cache"), *flags,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def read_until(stream: asyncio.StreamReader, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in (line := (await stream.readline()).decode()):
            assert line, f"the process ended without saying {text!r}"


async def test_port_in_use_is_one_sentence_and_exit_code_1(frontend: RunningFrontend, tmp_path):
    process = await start_process(tmp_path, "--port", str(frontend.process.port))
    _, errors = await process.communicate()
    lines = [line for line in errors.decode().splitlines() if line.startswith("error: ")]
    assert lines == [f"error: cannot listen on 127.0.0.1:{frontend.process.port}: port in use by another process"]
    assert process.returncode == 1
    assert "Traceback" not in errors.decode()


@pytest.mark.parametrize("end", ["sigterm", "sigint", "parent"])
async def test_process_ends_cleanly(engine: FakeEngine, tmp_path, end: str):
    flags = ("--port", "0", "--engine-endpoints", engine.endpoint, "--owner", "parent")
    process = await start_process(tmp_path, *flags)
    await read_until(process.stderr, "now SERVING")
    if end == "parent":
        process.stdin.close()
    else:
        process.send_signal(signal.SIGTERM if end == "sigterm" else signal.SIGINT)
    async with asyncio.timeout(30):
        errors = await process.stderr.read()
        await process.wait()
    assert process.returncode == 0, errors.decode()
    assert "Traceback" not in errors.decode()
    assert engine.goodbyes
    await engine.wait_until(lambda: not engine.sessions)


async def test_wrong_settings_are_one_sentence_and_exit_code_2(tmp_path):
    for flags, said in (
        (("--engine-endpoints", "nowhere"), "'nowhere' is neither host:port nor unix:/path"),
        (("--port", "70000"), "--port"),
        (("--nonsense", "1"), "nonsense"),
    ):
        process = await start_process(tmp_path, *flags)
        _, errors = await process.communicate()
        assert process.returncode == 2
        assert said in errors.decode()
        assert "Traceback" not in errors.decode()
