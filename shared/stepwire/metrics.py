"""The HTTP endpoint of a process: /metrics for Prometheus, /healthz and /readyz for probes that cannot speak gRPC.

Runs in threads of its own, so that a scrape never costs the event loop or the step loop more than the interpreter
lock. The answers of both probes come from cached state: `is_ready` and `is_alive` must not block.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8

from stepwire.listen_address import bind_error
from stepwire.metric_aliases import Collects

logger = logging.getLogger(__name__)

# Buckets of the latency of one request, of the first token, and of the time between tokens; seconds.
REQUEST_LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
# 1, 2, 5, 10, 20, 50, ... tokens. Histograms are made before a model is known, so it ends at a round million.
TOKEN_COUNT_BUCKETS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 1_000_000)
COUNT_BUCKETS = (1, 2, 5, 10, 20)
# Of what takes microseconds: transport, the phases of a step, pauses.
FAST_BUCKETS = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1,
)  # fmt: skip
# Of what is mostly fast, and sometimes as slow as a request.
WIDE_BUCKETS = (*FAST_BUCKETS, *(bound for bound in REQUEST_LATENCY_BUCKETS if bound > 1 and bound <= 60))

# How soon the endpoint notices that it is to close; it sleeps in between.
CLOSE_POLL_S = 0.2

Probe = Callable[[], bool]


def serve_http(
    port: int, registry: Collects, is_ready: Probe, is_alive: Probe, *, host: str = "127.0.0.1"
) -> tuple[int, Callable[[], None]]:
    """Start the endpoint; returns the bound port and a function that stops it. Raises BindError."""
    probes = {"/readyz": is_ready, "/healthz": is_alive}
    handler = type("Handler", (_Handler,), {"registry": registry, "probes": probes})
    try:
        server = _Server((host, port), handler)
    except OSError:
        raise bind_error(host, port) from None
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": CLOSE_POLL_S}, name="metrics-http", daemon=True
    )
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, close


def encoder_for(accept: str) -> tuple[Callable[[Collects], bytes], str]:
    """What makes text of a registry for a scraper that accepts this, and its content type."""
    encode, content_type = choose_encoder(accept)
    if isinstance(encode, partial):
        # Asked for underscores, prometheus-client 0.26 puts them for the colons of sample names in OpenMetrics, which
        # are allowed in all formats. No name of ours needs to be escaped.
        encode = partial(encode.func, **{**encode.keywords, "escaping": ALLOWUTF8})
    # All it wants of a registry is `collect`.
    return cast(Callable[[Collects], bytes], encode), content_type


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        # A scraper that hangs up is its own business; anything else is a bug of ours.
        level = logging.DEBUG if isinstance(sys.exc_info()[1], ConnectionError) else logging.ERROR
        logger.log(level, "metrics request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    registry: Collects
    probes: dict[str, Probe]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = encoder_for(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(self.registry))
        elif path in self.probes:
            is_good = self.probes[path]()
            self._answer(200 if is_good else 503, "text/plain; charset=utf-8", b"ok\n" if is_good else b"not ready\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", b"try /metrics, /healthz or /readyz\n")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class names it so
        logger.debug("metrics request of %s: %s", self.address_string(), format % args)
