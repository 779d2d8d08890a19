"""One trace from the caller to the engine and back, received over OTLP from both real processes with the real model.

Both send over gRPC; test_trace_ratio.py has them send over HTTP.
"""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from free_ports import free_port
from otlp_receiver import OtlpReceiver, ReceivedSpan, receiving
from running_stack import SERVING, Frontend, running_stack
from stepwire.v1 import admin_service_pb2, admin_service_pb2_grpc, generation_service_pb2

pytestmark = pytest.mark.slow

CANARY = "sesquipedalian"
SERVER, CLIENT = 2, 3
# Of a request's spans, from the caller down.
BOTH = ["stepwire-frontend", "stepwire-frontend", "stepwire-engine-core"]


class Traced:
    """A stack whose spans arrive at `receiver`."""

    def __init__(self, frontend: Frontend, http_port: int, receiver: OtlpReceiver) -> None:
        self.frontend = frontend
        self.url = f"http://127.0.0.1:{http_port}"
        self.receiver = receiver


@pytest.fixture(scope="module")
def traced(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with (
        pytest.MonkeyPatch.context() as patch,
        receiving() as (receiver, endpoint),
        running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack,
    ):
        # Spans are sent in batches, and no test waits for the usual five seconds.
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        port, traced = free_port(), ("--otlp-endpoint", endpoint)
        frontend = stack.frontend(stack.engine(*traced, "--trace-detail-ratio", "1"), http_port=port, flags=traced)
        frontend.wait_for_health(SERVING)
        yield Traced(frontend, port, receiver)


def new_parent(*, is_sampled: bool = True) -> tuple[str, str, str]:
    """(trace id, span id, traceparent)"""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-{'01' if is_sampled else '00'}"


def request(**options) -> generation_service_pb2.GenerateRequest:
    return generation_service_pb2.GenerateRequest(
        request_id=secrets.token_hex(4), text=f"{CANARY} means", sampling={"temperature": 0}, **options
    )


def chain(spans: list[ReceivedSpan], parent_id: str) -> list[ReceivedSpan]:
    """From the child of `parent_id` down, checking that each has one child, less those of a slow tokenizer."""
    found = []
    while children := [span for span in spans if span.parent_id == parent_id and span.name != "tokenize"]:
        assert len(children) == 1
        found.append(children[0])
        parent_id = children[0].span_id
    return found


def test_a_grpc_stream_is_one_trace_through_both_processes(traced: Traced) -> None:
    trace_id, caller_span, traceparent = new_parent()
    sent = request(stop={"max_tokens": 6}, output={"timings": True})
    list(traced.frontend.generation.GenerateStream(sent, metadata=(("traceparent", traceparent),)))
    root, client, run = chain(traced.receiver.wait_for(trace_id, 3), caller_span)
    assert [(span.service, span.name, span.kind) for span in (root, client, run)] == [
        ("stepwire-frontend", "llm_request", SERVER),
        ("stepwire-frontend", "engine_core.request", CLIENT),
        ("stepwire-engine-core", "engine_core.run", SERVER),
    ]
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.request.id"] == run.attributes["gen_ai.request.id"] == sent.request_id
    assert root.attributes["gen_ai.request.temperature"] == 0
    assert root.attributes["gen_ai.usage.output_tokens"] == 6
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert root.attributes["rpc.grpc.status_code"] == 0
    assert root.attributes["gen_ai.latency.e2e"] >= root.attributes["gen_ai.latency.time_to_first_token"] > 0
    assert not root.is_error
    assert root.attributes["server.address"] == root.attributes["client.address"] == "127.0.0.1"
    assert root.attributes["stepwire.boot_id"] == client.attributes["stepwire.boot_id"]
    # The engine's instance is the boot that the frontend names.
    assert root.attributes["stepwire.boot_id"] == run.resource["service.instance.id"]
    assert root.resource["process.pid"] != run.resource["process.pid"]
    names = [name for name, _, _ in run.events]
    times = [time for _, time, _ in run.events]
    assert names == ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"]
    assert times == sorted(times)
    queued, scheduled, first_token, finished = (facts for _, _, facts in run.events)
    assert queued == {"position": 0, "waiting_tokens_ahead": 0}
    assert set(scheduled) == {"step", "cached_tokens", "blocks"}
    assert scheduled["blocks"] > 0
    assert first_token["step"] >= scheduled["step"] > 0
    # Not there twice.
    assert client.events == []
    assert "stepwire.clock" not in client.attributes
    assert finished == {"reason": "length"}
    assert root.start_ns <= run.start_ns <= run.end_ns <= root.end_ns


def test_an_http_chat_is_one_trace(traced: Traced) -> None:
    trace_id, caller_span, traceparent = new_parent()
    body = {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 4, "model": "", "n": 2, "seed": 1}
    with urllib.request.urlopen(f"{traced.url}/v1/models") as response:
        body["model"] = json.load(response)["data"][0]["id"]
    headers = {"content-type": "application/json", "traceparent": traceparent}
    call = urllib.request.Request(f"{traced.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call) as response:
        json.load(response)
    spans = traced.receiver.wait_for(trace_id, 4)
    (root,) = [span for span in spans if span.parent_id == caller_span]
    (client,) = [span for span in spans if span.parent_id == root.span_id and span.name != "tokenize"]
    runs = [span for span in spans if span.parent_id == client.span_id]
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.request.n"] == 2
    assert [span.service for span in (root, client, *runs)] == [*BOTH, BOTH[-1]]


def test_every_prompt_of_an_http_completion_has_a_part_of_its_own(traced: Traced) -> None:
    trace_id, caller_span, traceparent = new_parent()
    body = json.dumps({"prompt": [CANARY, "One", "Two"], "max_tokens": 2}).encode()
    headers = {"content-type": "application/json", "traceparent": traceparent, "x-request-id": "call-7"}
    with urllib.request.urlopen(urllib.request.Request(f"{traced.url}/v1/completions", body, headers)) as response:
        usage = json.load(response)["usage"]
    spans = traced.receiver.wait_for(trace_id, 7)
    (root,) = [span for span in spans if span.parent_id == caller_span]
    parts = [span for span in spans if span.parent_id == root.span_id and span.name != "tokenize"]
    runs = [chain(spans, part.span_id) for part in parts]
    assert root.attributes["gen_ai.request.id"] == "call-7"
    assert sorted(part.attributes["gen_ai.request.id"] for part in parts) == ["call-7-0", "call-7-1", "call-7-2"]
    assert [part.attributes["gen_ai.request.id"] for part in parts] == [
        run.attributes["gen_ai.request.id"] for (run,) in runs
    ]
    used = [part.attributes["gen_ai.usage.output_tokens"] for part in parts]
    assert sum(used) == root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert root.attributes["stepwire.engine_id"] == parts[0].attributes["stepwire.engine_id"]


def test_a_cancelled_request_is_a_whole_trace(traced: Traced) -> None:
    trace_id, caller_span, traceparent = new_parent()
    call = traced.frontend.generation.GenerateStream(
        request(stop={"max_tokens": 2000, "ignore_eos": True}), metadata=(("traceparent", traceparent),)
    )
    next(call)
    next(call)
    call.cancel()
    root, client, run = chain(traced.receiver.wait_for(trace_id, 3), caller_span)
    assert [span.service for span in (root, client, run)] == BOTH
    assert root.attributes["rpc.grpc.status_code"] == grpc.StatusCode.CANCELLED.value[0]
    assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert run.events[-1][::2] == ("FINISHED", {"reason": "aborted"})


def test_an_error_has_its_reason(traced: Traced) -> None:
    trace_id, caller_span, traceparent = new_parent()
    bad = request()
    bad.sampling.top_p = 7
    with pytest.raises(grpc.RpcError):
        traced.frontend.generation.Generate(bad, metadata=(("traceparent", traceparent),))
    (root,) = chain(traced.receiver.wait_for(trace_id, 1), caller_span)
    assert root.attributes["error.type"] == "FIELD_INVALID"
    # The caller's fault and not the server's.
    assert not root.is_error


def test_the_caller_decides_what_is_sampled(traced: Traced) -> None:
    silent, _, traceparent = new_parent(is_sampled=False)
    traced.frontend.generation.Generate(request(stop={"max_tokens": 1}), metadata=(("traceparent", traceparent),))
    loud, _, traceparent = new_parent()
    traced.frontend.generation.Generate(request(stop={"max_tokens": 1}), metadata=(("traceparent", traceparent),))
    traced.receiver.wait_for(loud, 3)
    assert traced.receiver.of(silent) == []


def test_no_span_holds_a_prompt_or_an_output(traced: Traced) -> None:
    trace_id, _, traceparent = new_parent()
    traced.frontend.generation.Generate(request(stop={"max_tokens": 1}), metadata=(("traceparent", traceparent),))
    traced.receiver.wait_for(trace_id, 3)
    assert CANARY.encode() not in traced.receiver.raw


def test_the_start_of_the_engine_is_a_trace(traced: Traced) -> None:
    startup = traced.receiver.find(lambda span: span.name == "startup" and span.service == "stepwire-engine-core")
    phases = [span for span in traced.receiver.of(startup.trace_id) if span.parent_id == startup.span_id]
    assert [span.name for span in phases] == ["load_model", "profile_memory", "allocate_kv_cache", "warm_up"]
    assert startup.start_ns == phases[0].start_ns
    assert startup.end_ns >= phases[-1].end_ns


def test_the_start_of_the_frontend_is_the_wait_for_an_engine(traced: Traced) -> None:
    startup = traced.receiver.find(lambda span: span.name == "startup" and span.service == "stepwire-frontend")
    (connect,) = [span for span in traced.receiver.of(startup.trace_id) if span.parent_id == startup.span_id]
    assert (connect.name, connect.end_ns <= startup.end_ns) == ("connect", True)


def test_steps_are_linked_to_the_requests_in_them(traced: Traced) -> None:
    trace_id, _, traceparent = new_parent()
    traced.frontend.generation.Generate(request(stop={"max_tokens": 3}), metadata=(("traceparent", traceparent),))
    (run,) = [span for span in traced.receiver.wait_for(trace_id, 3) if span.name == "engine_core.run"]
    first_step = next(facts["step"] for name, _, facts in run.events if name == "SCHEDULED")
    step = traced.receiver.find(lambda span: span.name == "engine_core.step" and (trace_id, run.span_id) in span.links)
    assert step.attributes["step"] == first_step
    assert step.parent_id == ""
    phases = traced.receiver.wait_for(step.trace_id, 5)
    assert {span.name for span in phases if span.parent_id == step.span_id} == {
        "schedule",
        "execute",
        "sample",
        "update",
    }


def test_a_histogram_names_a_trace_as_an_example(traced: Traced) -> None:
    trace_id, _, traceparent = new_parent()
    traced.frontend.generation.Generate(request(stop={"max_tokens": 1}), metadata=(("traceparent", traceparent),))
    scrape = urllib.request.Request(
        f"http://127.0.0.1:{traced.frontend.metrics_port}/metrics", headers={"accept": "application/openmetrics-text"}
    )
    with urllib.request.urlopen(scrape) as response:
        text = response.read().decode()
    assert f'# {{trace_id="{trace_id}"}}' in text


def test_an_operation_of_an_operator_is_a_span(traced: Traced) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{traced.frontend.admin_port}") as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        admin.IsPaused(admin_service_pb2.IsPausedRequest())
    span = traced.receiver.find(lambda span: span.name == "engine_core.utility/is_paused")
    assert (span.service, span.kind, span.is_error) == ("stepwire-frontend", CLIENT, False)
