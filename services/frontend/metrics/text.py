"""Rows about the work on text: tokenizing, detokenizing, taking in a batch of outputs."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from frontend.text_times import TextTimes
from stepwire.metric_rows import counter, gauge, histogram
from stepwire.metrics import FAST_BUCKETS

_TOKENIZE = histogram("stepwire_frontend_tokenize_seconds", "Making the token ids of a prompt.", FAST_BUCKETS)
_QUEUE_DEPTH = gauge(
    "stepwire_frontend_tokenize_queue_depth", "Texts and chats that are in the tokenizer's threads or wait for one."
)
_DETOKENIZE = histogram(
    "stepwire_frontend_detokenize_seconds",
    "Making text of a batch, stop strings included; tokens whose text is known cost nothing here.",
    FAST_BUCKETS,
)
_PROCESSING = histogram(
    "stepwire_frontend_output_processing_seconds", "Taking in a batch of at most 128 outputs.", FAST_BUCKETS
)
PROCESSING_ERRORS = counter(
    "stepwire_frontend_output_processing_errors_total",
    "Requests whose output could not be processed; each fails alone.",
    ("stage",),
)
ROWS = (_TOKENIZE, _QUEUE_DEPTH, _DETOKENIZE, _PROCESSING, PROCESSING_ERRORS)


class TextMetrics:
    """Renders the times at each scrape."""

    def __init__(self, registry: CollectorRegistry, times: TextTimes) -> None:
        self._times = times
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield _TOKENIZE.histogram_family([((), self._times.tokenize)])
        yield _QUEUE_DEPTH.family([((), self._times.num_in_threads)])
        yield _DETOKENIZE.histogram_family([((), self._times.detokenize)])
        yield _PROCESSING.histogram_family([((), self._times.processing)])
