"""Rows about calls: gRPC methods of the public and admin ports, HTTP requests, refused credentials."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from stepwire.metric_rows import Series, counter, histogram
from stepwire.metrics import REQUEST_LATENCY_BUCKETS

# What an RPC that no engine is asked for takes, and what one that generates does.
RPC_BUCKETS = (0.005, 0.01, 0.05, 0.1, *REQUEST_LATENCY_BUCKETS)

STARTED = counter("stepwire_frontend_rpcs_started_total", "RPCs begun, health included.", ("grpc_method",))
HANDLED = counter("stepwire_frontend_rpcs_handled_total", "RPCs ended, by status code.", ("grpc_method", "grpc_code"))
DURATION = histogram(
    "stepwire_frontend_rpc_duration_seconds",
    "From the start of an RPC to its end; series appear with the first end.",
    RPC_BUCKETS,
    ("grpc_method", "grpc_code"),
)
MESSAGES = counter("stepwire_frontend_rpc_messages_total", "Messages of RPCs.", ("grpc_method", "direction"))
BYTES = counter("stepwire_frontend_rpc_bytes_total", "Bytes of these messages.", ("grpc_method", "direction"))
HTTP_REQUESTS = counter(
    "stepwire_frontend_http_requests_total",
    "HTTP requests ended, by status; 499 = the client went away before an answer.",
    ("method", "status", "handler"),
    "http_requests_total",
)
HTTP_DURATION = histogram(
    "stepwire_frontend_http_request_duration_seconds",
    "From an HTTP request's headers to the end of its answer.",
    REQUEST_LATENCY_BUCKETS,
    ("method", "handler"),
    "http_request_duration_seconds",
)
AUTH_FAILURES = counter(
    "stepwire_frontend_auth_failures_total", "Calls refused for their credentials, by reason.", ("reason",)
)
ROWS = (STARTED, HANDLED, DURATION, MESSAGES, BYTES, HTTP_REQUESTS, HTTP_DURATION, AUTH_FAILURES)


class Traffic:
    """Messages of one method in one direction; written on the event loop, for every message."""

    __slots__ = ("num", "num_bytes")

    def __init__(self) -> None:
        self.num = 0
        self.num_bytes = 0

    def serializer(self, serialize: Callable[[object], bytes]) -> Callable[[object], bytes]:
        """The same, and it counts."""

        def counted(message: object) -> bytes:
            data = serialize(message)
            self.num += 1
            self.num_bytes += len(data)
            return data

        return counted

    def deserializer(self, deserialize: Callable[[bytes], object]) -> Callable[[bytes], object]:
        """The same, and it counts."""

        def counted(data: bytes) -> object:
            self.num += 1
            self.num_bytes += len(data)
            return deserialize(data)

        return counted


class RpcTraffic:
    """Traffic by method and direction."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._found: dict[tuple[str, str], Traffic] = {}
        registry.register(self)

    def of(self, method: str, direction: str) -> Traffic:
        """`direction` is in or out, as this process sees it."""
        return self._found.setdefault((method, direction), Traffic())

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        found = self._found.copy()
        yield MESSAGES.family((key, traffic.num) for key, traffic in found.items())
        yield BYTES.family((key, traffic.num_bytes) for key, traffic in found.items())


class AuthFailures:
    """Counts that the gate keeps."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        series: list[Series] = [((reason,), number) for reason, number in self._read().items()]
        yield AUTH_FAILURES.family(series)
