"""How long the work on text takes: noted by the processors, rendered by a scrape."""

from __future__ import annotations

from stepwire.histogram import Histogram
from stepwire.metrics import FAST_BUCKETS
from stepwire.shared_histogram import SharedHistogram


class TextTimes:
    """One for each frontend, over all models it comes to serve. All but `tokenize` belong to the event loop."""

    def __init__(self) -> None:
        # Written by the tokenizer's threads.
        self.tokenize = SharedHistogram(FAST_BUCKETS)
        self.detokenize = Histogram(FAST_BUCKETS)
        self.processing = Histogram(FAST_BUCKETS)
        # In the threads, or waiting for one.
        self.num_in_threads = 0
