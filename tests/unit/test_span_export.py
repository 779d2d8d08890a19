"""Which spans leave the process and where they arrive: real exporters and real receivers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from opentelemetry.context import Context

from otlp_receiver import OtlpReceiver, receiving, receiving_http
from stepwire import tracing
from stepwire.settings import Settings
from stepwire.span_export import make_providers, traces_url

NOWHERE = "http://127.0.0.1:9"
TRACES_HTTP = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


@dataclass(frozen=True)
class Receivers:
    """One list of spans each, so that it shows which way they came."""

    grpc: OtlpReceiver
    http: OtlpReceiver
    # What stands for the endpoints in the cases below.
    urls: dict[str, str]


@pytest.fixture(scope="module")
def receivers() -> Iterator[Receivers]:
    http = OtlpReceiver()
    with receiving() as (grpc, grpc_url), receiving_http(http) as http_url:
        yield Receivers(grpc, http, {"GRPC": grpc_url, "HTTP": http_url, "HTTP/traces": f"{http_url}/v1/traces"})


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


def send(parents: list[Context | None], **settings: object) -> list[str]:
    """A span below each parent, all of them flushed; the trace ids."""
    providers = make_providers("test", "instance", Settings(**settings))
    assert providers is not None
    tracer = providers.sampling.get_tracer("test")
    spans = [tracer.start_span("span", parent) for parent in parents]
    for span in spans:
        span.end()
    providers.sampling.shutdown()
    return [f"{span.get_span_context().trace_id:032x}" for span in spans]


def parent(*, is_sampled: bool) -> Context | None:
    return tracing.extract([("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-{'01' if is_sampled else '00'}")])


@pytest.mark.parametrize(
    ("settings", "variables", "arrives"),
    [
        ({"otlp_endpoint": "GRPC"}, {}, "grpc"),
        ({"otlp_endpoint": "HTTP", "otlp_protocol": "http/protobuf"}, {}, "http"),
        ({"otlp_endpoint": "HTTP/traces", "otlp_protocol": "http/protobuf"}, {}, "http"),
        ({"otlp_endpoint": "HTTP"}, TRACES_HTTP, "http"),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "GRPC"}, "grpc"),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "GRPC"}, "grpc"),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "HTTP", **TRACES_HTTP}, "http"),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "HTTP/traces", **TRACES_HTTP}, "http"),
        (
            {},
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "GRPC", **TRACES_HTTP, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            "grpc",
        ),
        # The flags win.
        (
            {"otlp_endpoint": "GRPC", "otlp_protocol": "grpc"},
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": NOWHERE,
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": NOWHERE,
                "OTEL_TRACES_EXPORTER": "none",
                **TRACES_HTTP,
            },
            "grpc",
        ),
    ],
)
def test_spans_arrive_where_flags_or_else_variables_say(
    receivers: Receivers,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    variables: dict[str, str],
    arrives: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, receivers.urls.get(value, value))
    [trace_id] = send([None], **{name: receivers.urls.get(value, value) for name, value in settings.items()})
    [span] = getattr(receivers, arrives).wait_for(trace_id, 1)
    assert (span.service, span.name, span.resource["service.instance.id"]) == ("test", "span", "instance")
    assert span.resource["process.pid"] == os.getpid()


@pytest.mark.parametrize(
    "variables", [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "GRPC", "OTEL_TRACES_EXPORTER": "none"}, TRACES_HTTP]
)
def test_nothing_is_made_without_an_endpoint(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert make_providers("test", "instance", Settings()) is None


@pytest.mark.parametrize(
    ("ratio", "variables", "has_roots"),
    [
        (0.0, {}, False),
        (1.0, {}, True),
        (None, {}, True),
        (None, {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, False),
        (1.0, {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, True),
    ],
)
def test_the_ratio_is_for_whom_no_caller_has_decided(
    receivers: Receivers,
    monkeypatch: pytest.MonkeyPatch,
    ratio: float | None,
    variables: dict[str, str],
    has_roots: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = len(receivers.grpc.spans)
    parents = [*[None] * 20, parent(is_sampled=False), parent(is_sampled=True)]
    send(parents, otlp_endpoint=receivers.urls["GRPC"], trace_sample_ratio=ratio)
    received = receivers.grpc.spans[before:]
    assert [span.parent_id for span in received] == [""] * 20 * has_roots + ["cd" * 8]


@pytest.mark.parametrize(
    ("ratio", "sampler", "follows"),
    [
        (None, "", True),
        (0.0, "", True),
        (None, "parentbased_always_off", True),
        (None, "always_on", True),
        (None, "always_off", False),
        # It has a part of the requests that others keep, and no frontend can know which.
        (None, "traceidratio", False),
    ],
)
def test_who_keeps_what_callers_keep_is_known(
    monkeypatch: pytest.MonkeyPatch, ratio: float | None, sampler: str, follows: bool
) -> None:
    if sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.999")
    providers = make_providers("test", "instance", Settings(otlp_endpoint=NOWHERE, trace_sample_ratio=ratio))
    assert providers is not None
    assert providers.follows_callers is follows
    providers.sampling.shutdown()


def test_a_ratio_between_takes_about_that_share(receivers: Receivers) -> None:
    before = len(receivers.grpc.spans)
    send([None] * 1000, otlp_endpoint=receivers.urls["GRPC"], trace_sample_ratio=0.3)
    # Six standard deviations.
    assert abs(len(receivers.grpc.spans) - before - 300) < 90


def test_what_somebody_has_chosen_is_kept_whatever_the_ratio(receivers: Receivers) -> None:
    settings = Settings(otlp_endpoint=receivers.urls["GRPC"], trace_sample_ratio=0.0)
    providers = make_providers("test", "instance", settings)
    assert providers is not None
    before = len(receivers.grpc.spans)
    for number, provider in enumerate(providers):
        provider.get_tracer("test").start_span(str(number)).end()
    providers.sampling.shutdown()
    assert [span.name for span in receivers.grpc.spans[before:]] == ["1"]


def test_the_path_of_traces_is_added_to_a_collectors_address_once() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"
