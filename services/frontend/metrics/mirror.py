"""The engines' own metrics once more, for pickers that scrape frontends: `--metrics-mirror-engines`.

Under the names other tools know only, from the newest report of each engine. Whoever scrapes the engines as well counts
twice, so it is off unless asked for. An engine that is not attached has no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from frontend.engine_client.engine_facts import EngineFacts, EngineLoad
from stepwire.metric_rows import MetricRow, Series, counter, gauge

_LABELS = ("model_name", "engine")
_PLAIN: dict[MetricRow, Callable[[EngineLoad], float]] = {
    gauge("vllm:num_requests_running", "Requests in the running batch.", _LABELS): lambda load: load.running,
    gauge("vllm:num_requests_waiting", "Requests that wait for room or for a grammar.", _LABELS): lambda load: (
        load.waiting
    ),
    gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that requests use, 0 to 1.", _LABELS): lambda load: (
        load.kv_blocks_used / max(1, load.kv_blocks_total)
    ),
    counter("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.", _LABELS): lambda load: (
        load.prefix_query_tokens
    ),
    counter("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", _LABELS): lambda load: (
        load.prefix_hit_tokens
    ),
    counter("vllm:num_preemptions_total", "Requests preempted for want of KV blocks.", _LABELS): lambda load: (
        load.preemptions
    ),
    counter("vllm:prompt_tokens_total", "Prompt tokens of completed prefills.", _LABELS): lambda load: (
        load.prompt_tokens
    ),
    counter("vllm:generation_tokens_total", "Tokens generated.", _LABELS): lambda load: load.generation_tokens,
}
_WAITING_BY_REASON = gauge(
    "vllm:num_requests_waiting_by_reason",
    "Waiting requests: for room (capacity) or for a grammar (deferred).",
    (*_LABELS, "reason"),
)
_CONFIG = gauge(
    "vllm:cache_config_info",
    "1, labelled with the size of the KV cache; the null block is among the blocks.",
    ("engine", "block_size", "num_gpu_blocks"),
)
ROWS = (*_PLAIN, _WAITING_BY_REASON, _CONFIG)


class Mirrored(Protocol):
    """A connection to an engine."""

    facts: EngineFacts | None
    load: EngineLoad

    @property
    def is_attached(self) -> bool: ...


class EngineMirror:
    """Registers itself; looks at the connections at each scrape."""

    def __init__(self, registry: CollectorRegistry, connections: Callable[[], Sequence[Mirrored]]) -> None:
        self._connections = connections
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        attached = [
            (one.facts, one.load) for one in list(self._connections()) if one.is_attached and one.facts is not None
        ]
        for row, read in _PLAIN.items():
            yield row.family(((facts.model, facts.engine_id), read(load)) for facts, load in attached)
        yield _WAITING_BY_REASON.family(series for facts, load in attached for series in _waiting(facts, load))
        yield _CONFIG.family(
            ((facts.engine_id, str(facts.block_size), str(facts.num_blocks)), 1) for facts, _ in attached
        )


def _waiting(facts: EngineFacts, load: EngineLoad) -> Iterator[Series]:
    labels = (facts.model, facts.engine_id)
    yield (*labels, "capacity"), load.waiting - load.waiting_deferred
    yield (*labels, "deferred"), load.waiting_deferred
