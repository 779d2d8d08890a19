"""A real receiver of traces, OTLP over gRPC and over HTTP, in the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]
    # (trace id, span id)
    links: list[tuple[str, str]]
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """`endpoint` is what goes into --otlp-endpoint."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._spans: list[ReceivedSpan] = []
        self.raw = b""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def take(self, request: Any) -> None:
        with self._news:
            self.raw += request.SerializeToString()
            for resource_spans in request.resource_spans:
                resource = _attributes(resource_spans.resource.attributes)
                self._spans += [
                    _received(resource, span) for scope in resource_spans.scope_spans for span in scope.spans
                ]
            self._news.notify_all()

    def wait_for(self, trace_id: str, num_spans: int) -> list[ReceivedSpan]:
        """All spans of a trace, once there are as many, not counting what only a slow machine shows."""

        def has_all() -> bool:
            return sum(span.name != "tokenize" for span in self.of(trace_id)) >= num_spans

        with self._news:
            assert self._news.wait_for(has_all, TIMEOUT_S), self._spans
            return self.of(trace_id)

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._news:
            return list(self._spans)

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self._spans if span.trace_id == trace_id]

    def find(self, is_wanted: Callable[[ReceivedSpan], bool]) -> ReceivedSpan:
        """The first that is wanted, once there is one."""

        def found() -> ReceivedSpan | None:
            return next(filter(is_wanted, self._spans), None)

        with self._news:
            assert self._news.wait_for(found, TIMEOUT_S), self._spans
            span = found()
            assert span is not None
            return span


@contextmanager
def receiving() -> Iterator[tuple[OtlpReceiver, str]]:
    """A receiver and its endpoint."""
    receiver = OtlpReceiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def receiving_http(receiver: OtlpReceiver) -> Iterator[str]:
    """Let it take spans over HTTP too; the endpoint, without the path of traces."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_right = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            if is_right:
                receiver.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if is_right else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _received(resource: dict[str, Any], span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=resource["service.name"],
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        attributes=_attributes(span.attributes),
        resource=resource,
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        events=[(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events],
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _plain(pair.value) for pair in pairs}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind)
