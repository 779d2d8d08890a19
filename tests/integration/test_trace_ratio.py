"""Which requests leave spans with which flags, by what a receiver has when both processes have ended."""

from __future__ import annotations

import secrets
import signal
from collections import Counter
from pathlib import Path

import pytest

from otlp_receiver import receiving
from running_stack import SERVING, Frontend, Service
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

REQUEST_SPANS = ("llm_request", "engine_core.request", "engine_core.run")


def run_stack(tokenizer_dir: Path, *flags: str) -> str:
    """From start to end, with a request without a trace, one not to be sampled, and one that is; the trace of that."""
    engine = Service("fakes.fake_engine_process", "--port", "0", *flags)
    frontend = Frontend(engine.port, cache_dir=tokenizer_dir, flags=("--tokenizer", str(tokenizer_dir), *flags))
    frontend.wait_for_health(SERVING)
    trace_id = secrets.token_hex(16)
    sampled = f"00-{trace_id}-{secrets.token_hex(8)}-01"
    unsampled = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
    for metadata in ((), (("traceparent", unsampled),), (("traceparent", sampled),)):
        frontend.generation.Generate(GenerateRequest(text="hello", stop={"max_tokens": 3}), metadata=metadata)
    frontend.channel.close()
    # Both send what they have before they end.
    for service in (frontend, engine):
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
    return trace_id


@pytest.mark.parametrize(("ratio", "num_own"), [("0", 0), ("1", 1)])
def test_a_ratio_is_for_requests_whose_caller_has_not_decided(tokenizer_dir: Path, ratio: str, num_own: int) -> None:
    with receiving() as (receiver, endpoint):
        trace_id = run_stack(tokenizer_dir, "--otlp-endpoint", endpoint, "--trace-sample-ratio", ratio)
        spans = receiver.spans
    counts = Counter(span.name for span in spans if span.trace_id == trace_id)
    assert counts == dict.fromkeys(REQUEST_SPANS, 1)
    counts = Counter(span.name for span in spans if span.trace_id != trace_id and span.name in REQUEST_SPANS)
    assert counts == dict.fromkeys(REQUEST_SPANS[: 3 * num_own], 1)
    # The starts of both processes are nobody's either.
    assert sum(span.name == "startup" for span in spans) == 2 * num_own
