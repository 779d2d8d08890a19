"""Which spans are kept and where they go: OTLP over gRPC or HTTP. A flag wins over a variable of OpenTelemetry.

The SDK reads its other variables itself: samplers, headers, certificates, time-outs, batches.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from stepwire import __version__
from stepwire.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

HTTP_PATH = "/v1/traces"


class Providers(NamedTuple):
    """What makes the spans of this process. Both send them the same way, and the end of the first is that of both."""

    sampling: TracerProvider
    # Keeps every span: whoever uses it has chosen already.
    keeping: TracerProvider

    @property
    def follows_callers(self) -> bool:
        """The first keeps every span whose parent in another process was kept there."""
        return _follows_callers(self.sampling)


def make_providers(service: str, instance_id: str, settings: Settings) -> Providers | None:
    """None when the settings export no spans.

    `service`: the value of service.name. Where the settings do not say how to sample, OpenTelemetry's variables do.
    """
    exporter = make_exporter(settings)
    if exporter is None:
        return None
    # Here and not at the top: only who exports pays for it.
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBasedTraceIdRatio

    service_names = {"service.name": service, "service.version": __version__, "service.instance.id": instance_id}
    resource = Resource.create({**service_names, **_process_attributes()})
    ratio = settings.trace_sample_ratio
    sampler = None if ratio is None else ParentBasedTraceIdRatio(ratio)
    sampling = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    keeping = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    processor = BatchSpanProcessor(exporter)
    for provider in (sampling, keeping):
        provider.add_span_processor(processor)
    return Providers(sampling, keeping)


def _follows_callers(provider: TracerProvider) -> bool:
    """A ratio keeps low numbers first: who keeps a child in the trace of the highest keeps all."""
    from opentelemetry.sdk.trace.sampling import Decision

    trace_id, span_id = 2**128 - 1, 1
    kept = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    parent = set_span_in_context(NonRecordingSpan(kept))
    return provider.sampler.should_sample(parent, trace_id, "").decision is Decision.RECORD_AND_SAMPLE


def _process_attributes() -> dict[str, str | int]:
    # Not the command line, which an operator may not want to see elsewhere.
    return {
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "process.executable.path": sys.executable,
        "process.runtime.name": sys.implementation.name,
        "process.runtime.version": platform.python_version(),
    }


def make_exporter(settings: Settings) -> SpanExporter | None:
    """None when the settings export no traces."""
    if not settings.exports_traces:
        return None
    endpoint = settings.otlp_endpoint or None
    # Imported only here: only who exports pays for it, and only for the one that it uses.
    if settings.trace_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter

        return grpc_exporter.OTLPSpanExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter

    return http_exporter.OTLPSpanExporter(endpoint=endpoint and traces_url(endpoint))


def traces_url(endpoint: str) -> str:
    """Where HTTP posts to. The endpoint of a collector is for all signals, unless it names that of traces."""
    base = endpoint.rstrip("/")
    return base if base.endswith(HTTP_PATH) else base + HTTP_PATH
