"""Which requests leave spans with which flags, by what a receiver has when both processes have ended.

The spans are sent over HTTP as well as over gRPC, and are the same.
"""

from __future__ import annotations

import secrets
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from otlp_receiver import receiving, receiving_http
from running_stack import SERVING, Frontend, Service
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

REQUEST_SPANS = ("llm_request", "engine_core.request", "engine_core.run")


def run_stack(
    tokenizer_dir: Path, frontend_flags: Sequence[str], engine_flags: Sequence[str] | None = None
) -> tuple[str, str]:
    """From start to end, with a request without a trace, one not to be sampled, and one that is.

    The engine's flags are the frontend's, unless given. Returns the trace and the span of the last one's caller.
    """
    own_flags = frontend_flags if engine_flags is None else engine_flags
    engine = Service("fakes.fake_engine_process", "--port", "0", *own_flags)
    flags = ("--tokenizer", str(tokenizer_dir), *frontend_flags)
    frontend = Frontend(engine.port, cache_dir=tokenizer_dir, flags=flags)
    frontend.wait_for_health(SERVING)
    trace_id, caller_span = secrets.token_hex(16), secrets.token_hex(8)
    sampled = f"00-{trace_id}-{caller_span}-01"
    unsampled = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
    for metadata in ((), (("traceparent", unsampled),), (("traceparent", sampled),)):
        frontend.generation.Generate(GenerateRequest(text="hello", stop={"max_tokens": 3}), metadata=metadata)
    frontend.channel.close()
    # Both send what they have before they end.
    for service in (frontend, engine):
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
    return trace_id, caller_span


@pytest.mark.parametrize(("ratio", "num_own", "protocol"), [("0", 0, "grpc"), ("1", 1, "http/protobuf")])
def test_a_ratio_is_for_requests_whose_caller_has_not_decided(
    tokenizer_dir: Path, ratio: str, num_own: int, protocol: str
) -> None:
    with receiving() as (receiver, grpc_endpoint), receiving_http(receiver) as http_endpoint:
        endpoint = grpc_endpoint if protocol == "grpc" else http_endpoint
        flags = ("--otlp-endpoint", endpoint, "--otlp-protocol", protocol, "--trace-sample-ratio", ratio)
        trace_id, caller_span = run_stack(tokenizer_dir, flags)
        spans = receiver.spans
    sampled = {span.name: span for span in spans if span.trace_id == trace_id and span.name in REQUEST_SPANS}
    assert [sampled[name].parent_id for name in REQUEST_SPANS] == [
        caller_span,
        *(sampled[name].span_id for name in REQUEST_SPANS[:-1]),
    ]
    # Tokenizing has a span when it takes long, as on a busy machine.
    counts = Counter(span.name for span in spans if span.trace_id == trace_id and span.name != "tokenize")
    assert counts == dict.fromkeys(REQUEST_SPANS, 1)
    counts = Counter(span.name for span in spans if span.trace_id != trace_id and span.name in REQUEST_SPANS)
    assert counts == dict.fromkeys(REQUEST_SPANS[: 3 * num_own], 1)
    # The starts of both processes are nobody's either.
    assert sum(span.name == "startup" for span in spans) == 2 * num_own


def test_a_frontend_shows_what_happens_in_an_engine_that_exports_nothing(tokenizer_dir: Path) -> None:
    with receiving() as (receiver, endpoint):
        trace_id, _ = run_stack(tokenizer_dir, ("--otlp-endpoint", endpoint), ())
        spans = receiver.of(trace_id)
    assert {span.service for span in spans} == {"stepwire-frontend"}
    (span,) = [span for span in spans if span.name == "engine_core.request"]
    names, times, _ = zip(*span.events, strict=True)
    assert names == ("QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED")
    assert [span.start_ns, *times, span.end_ns] == sorted([span.start_ns, *times, span.end_ns])
    assert span.attributes["stepwire.clock"] == "estimated"
