"""Rows about the streams to frontends: frames, sessions, what waits to be written, utility calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from engine_core.metrics.engine_view import LABELS, PREFIX, EngineView
from engine_core.output_queue import BATCHES
from stepwire.metric_rows import counter, gauge, histogram
from stepwire.metrics import WIDE_BUCKETS
from stepwire.stream_meter import StreamRows

_STREAM = StreamRows("engine_core", LABELS)
_SESSIONS = gauge(f"{PREFIX}sessions", "Frontends connected.", (*LABELS, "state"))
_EVENTS = counter(f"{PREFIX}session_events_total", "What happened to sessions.", (*LABELS, "event"))
_OUTBOX_BYTES = gauge(f"{PREFIX}outbox_bytes", "Output that a frontend has not taken.", (*LABELS, "client_id"))
_COALESCED = counter(
    f"{PREFIX}batches_coalesced_total",
    "Steps whose tokens went out with those of a later one, because their frontend was behind.",
    LABELS,
)
_BY_CALL = (*LABELS, "call", "code")
_CALLS = counter(f"{PREFIX}utility_calls_total", "Utility calls answered; code is OK or a reason.", _BY_CALL)
_CALL_TIMES = histogram(
    f"{PREFIX}utility_seconds", "From the loop taking a utility call to its answer.", WIDE_BUCKETS, _BY_CALL
)
ROWS = (*_STREAM.all, _SESSIONS, _EVENTS, _OUTBOX_BYTES, _COALESCED, _CALLS, _CALL_TIMES)


def collect(view: EngineView) -> Iterator[Metric]:
    """Called for each scrape."""
    yield from view.meter.collect(_STREAM, view.labels)
    sessions = view.sessions.all()
    yield _SESSIONS.family(view.by({"live": len(sessions)}))
    yield _EVENTS.family(view.by(view.sessions.events.snapshot()))
    unsent: Counter[str] = Counter()
    for session in sessions:
        unsent[session.client_id] += session.outbox.unsent_bytes
    yield _OUTBOX_BYTES.family(view.by(unsent))
    proc = view.proc
    num_coalesced = proc.output_queue.coalesced.snapshot()[BATCHES] if proc else 0
    yield _COALESCED.family([(view.labels, num_coalesced)])
    found = proc.utilities.times.found.copy() if proc else {}
    yield _CALLS.family(((*view.labels, *call), times.count) for call, times in found.items())
    yield _CALL_TIMES.histogram_family(((*view.labels, *call), times) for call, times in found.items())
