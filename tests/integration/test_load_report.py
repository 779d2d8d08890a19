"""Load reports of the engine in trailers and headers, for those who ask: every form, gRPC and HTTP.

The library that gRPC's Python client is made of keeps binary reports to itself, for its own load balancing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from fakes.fake_engine import FakeEngine
from free_ports import free_port
from running_frontend import SERVING, RunningFrontend, failure_of, request, running_frontend
from stepwire.engine.v1.engine_core_pb2 import SchedulerStats
from stepwire_client import AsyncClient, CallFacts

KEY = "endpoint-load-metrics"
# Of 64 places.
LOAD = SchedulerStats(running=16, waiting=3, waiting_tokens=500, kv_blocks_used=50, kv_blocks_total=80)
NAMED = {"kv_cache_usage": 0.625, "requests_running": 16, "requests_waiting": 3, "queued_prompt_tokens": 500}


def orca_message() -> Any:
    """An empty xds.data.orca.v3.OrcaLoadReport: the parts of it that are used here, as its .proto declares them."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="orca.proto", package="xds.data.orca.v3", syntax="proto3")
    report = file.message_type.add(name="OrcaLoadReport")
    entry = report.nested_type.add(name="NamedMetricsEntry", options={"map_entry": True})
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL)
    report.field.add(
        name="named_metrics",
        number=8,
        type=field.TYPE_MESSAGE,
        type_name=".xds.data.orca.v3.OrcaLoadReport.NamedMetricsEntry",
        label=field.LABEL_REPEATED,
    )
    report.field.add(name="application_utilization", number=9, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("xds.data.orca.v3.OrcaLoadReport"))()


@pytest.fixture
async def loaded(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[RunningFrontend]:
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", http_port=free_port()) as running:
        await running.wait_for_health(SERVING)
        engine.stats = LOAD
        yield running


async def trailers_of(running: RunningFrontend, form: str) -> list[dict[str, Any]]:
    """Of a stream and of an answer at once."""
    metadata = ((f"{KEY}-format", form),) if form else ()
    found = []
    async with AsyncClient(f"127.0.0.1:{running.process.port}") as client:
        facts = CallFacts()
        assert [event async for event in client.generate_stream(request(), metadata=metadata, facts=facts)]
        found.append(facts.trailers)
        await client.generate(request(), metadata=metadata, facts=facts)
        found.append(facts.trailers)
    return found


def check_bytes(value: bytes) -> None:
    message = orca_message()
    message.ParseFromString(value)
    assert dict(message.named_metrics) == NAMED
    assert message.application_utilization == 0.625


async def test_text_and_json_say_the_same(loaded: RunningFrontend):
    for trailers in await trailers_of(loaded, "TEXT"):
        form, _, pairs = trailers[KEY].partition(" ")
        values = {name: float(value) for name, value in (pair.split("=") for pair in pairs.split(","))}
        assert form == "TEXT"
        assert values == {"application_utilization": 0.625, **{f"named_metrics.{key}": NAMED[key] for key in NAMED}}
    for trailers in await trailers_of(loaded, "json"):
        form, _, text = trailers[KEY].partition(" ")
        assert form == "JSON"
        assert json.loads(text) == {"application_utilization": 0.625, "named_metrics": NAMED}


async def test_the_scarcer_of_cache_and_places_is_the_utilization(loaded: RunningFrontend, engine: FakeEngine):
    engine.stats = SchedulerStats(running=48, kv_blocks_used=10, kv_blocks_total=100)
    for trailers in await trailers_of(loaded, "text"):
        assert "application_utilization=0.75," in trailers[KEY]


async def test_who_does_not_ask_is_not_told(loaded: RunningFrontend):
    for trailers in await trailers_of(loaded, ""):
        assert not [key for key in trailers if key.startswith(KEY)]


async def test_a_form_that_is_none_is_refused_by_name(loaded: RunningFrontend, engine: FakeEngine):
    metadata = ((f"{KEY}-format", "xml"),)
    for call in (
        loaded.generation.Generate(request(), metadata=metadata),
        loaded.stream(request(), metadata=metadata).rest(),
    ):
        failure = await failure_of(call)
        assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [f"{KEY}-format"])
    assert not engine.adds


async def test_http_has_it_in_a_header_and_there_bytes_can_be_seen(loaded: RunningFrontend):
    body = {"prompt": "hello world", "max_tokens": 2}
    url = f"http://127.0.0.1:{loaded.process._settings.http_port}"
    async with httpx2.AsyncClient(base_url=url, timeout=30) as http:

        async def header(form: str, *, key: str = KEY, **more: object) -> str:
            headers = {f"{KEY}-format": form}
            return (await http.post("/v1/completions", json={**body, **more}, headers=headers)).headers[key]

        assert json.loads((await header("json")).removeprefix("JSON "))["named_metrics"] == NAMED
        assert (await header("text", stream=True)).startswith("TEXT application_utilization=0.625,")
        check_bytes(base64.b64decode(await header("bin", key=f"{KEY}-bin")))
        wrong = await http.post("/v1/completions", json=body, headers={f"{KEY}-format": "xml"})
        assert wrong.status_code == 400
