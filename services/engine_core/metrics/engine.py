"""Rows about the engine as a whole: its state, start and death, its configuration, its memory, its grammars."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from engine_core.kv_cache.residency import RESIDENCY_BUCKETS, BlockResidency
from engine_core.lifecycle import EngineState
from engine_core.metrics.engine_view import LABELS, PREFIX, EngineView
from engine_core.operations import SleepLevel, WakeTag
from engine_core.resolved_config import ResolvedConfig
from engine_core.startup import STARTUP_PHASES
from stepwire.histogram import Histogram
from stepwire.metric_rows import MetricRow, counter, gauge, histogram
from stepwire.metrics import WIDE_BUCKETS

_STATE = gauge(f"{PREFIX}state", "1 for the current state.", (*LABELS, "state"))
_SLEEP = gauge(
    f"{PREFIX}sleep_state",
    "1 for what sleeps now.",
    (*LABELS, "sleep_state"),
    "vllm:engine_sleep_state",
)
_DEATHS = counter(f"{PREFIX}deaths_total", "Deaths by cause; the process ends with it.", (*LABELS, "cause"))
_STARTUP = gauge(f"{PREFIX}startup_seconds", "How long the phases of the start took.", (*LABELS, "phase"))
_MEMORY = gauge(
    f"{PREFIX}device_memory_bytes",
    "Memory of the device: weights and KV cache (0 asleep), what steps took besides at their peak, and what is free.",
    (*LABELS, "kind"),
)
_MODEL_LABELS = ("architecture", "dtype", "implementation", "scheduling_policy")
_LIMIT_LABELS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
_CONFIG = gauge(
    f"{PREFIX}config_info",
    "1, labelled with what computes the model and with the limits in force.",
    (*LABELS, *_MODEL_LABELS, *_LIMIT_LABELS),
)
_CACHE_CONFIG = gauge(
    f"{PREFIX}cache_config_info",
    "1, labelled with the settings of the KV cache; the null block is among the blocks.",
    (*LABELS, "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization"),
    "vllm:cache_config_info",
    alias_drops=("model_name",),
)
_GRAMMARS = gauge(f"{PREFIX}grammars_pending", "Grammars being compiled or queued for it.", LABELS)
_COMPILES = histogram(
    f"{PREFIX}grammar_compile_seconds", "Compiles of grammars.", WIDE_BUCKETS, (*LABELS, "kind", "outcome")
)
_HASHING = counter(f"{PREFIX}kv_hash_seconds_total", "Time of input threads spent hashing blocks.", LABELS)
# Sampled; with --kv-cache-metrics only.
RESIDENCY: dict[MetricRow, Callable[[BlockResidency], Histogram]] = {
    histogram(
        f"{PREFIX}kv_block_lifetime_seconds",
        "From handing a KV block out to its eviction.",
        RESIDENCY_BUCKETS,
        LABELS,
        "vllm:kv_block_lifetime_seconds",
    ): lambda found: found.lifetimes,
    histogram(
        f"{PREFIX}kv_block_idle_before_evict_seconds",
        "From the last time an evicted KV block was handed out or hit.",
        RESIDENCY_BUCKETS,
        LABELS,
        "vllm:kv_block_idle_before_evict_seconds",
    ): lambda found: found.idle_before_evict,
    histogram(
        f"{PREFIX}kv_block_reuse_gap_seconds",
        "Between two uses of a KV block that was hit.",
        RESIDENCY_BUCKETS,
        LABELS,
        "vllm:kv_block_reuse_gap_seconds",
    ): lambda found: found.reuse_gaps,
}
ROWS = (
    *(_STATE, _SLEEP, _DEATHS, _STARTUP, _MEMORY, _CONFIG, _CACHE_CONFIG, _GRAMMARS, _COMPILES, _HASHING),
    *RESIDENCY,
)
_SLEEP_STATES = {
    None: "awake",
    SleepLevel.PAUSE_ONLY: "awake",
    SleepLevel.OFFLOAD_WEIGHTS: "weights_offloaded",
    SleepLevel.DISCARD_ALL: "discard_all",
}


def collect(view: EngineView) -> Iterator[Metric]:
    """Called for each scrape."""
    state = view.lifecycle.state
    yield _STATE.family(view.by({one.name.lower(): one is state for one in EngineState}))
    asleep = _SLEEP_STATES[view.proc.utilities.sleep_state.level if view.proc else None]
    yield _SLEEP.family(view.by({one: one == asleep for one in _SLEEP_STATES.values()}))
    yield _DEATHS.family(view.by(view.deaths.snapshot()))
    yield _STARTUP.family(view.by({phase: view.startup_times.get(phase, 0) for phase in STARTUP_PHASES}))
    yield from _of_core(view)


def _of_core(view: EngineView) -> Iterator[Metric]:
    core = view.proc.core if view.proc else None
    yield _MEMORY.family(view.by(_memory(view)))
    yield _CONFIG.family([((*view.labels, *_config(core.config)), 1)] if core else [])
    yield _CACHE_CONFIG.family([((*view.labels, *_cache_config(view, core.config)), 1)] if core else [])
    grammars = core.structured_output if core else None
    yield _GRAMMARS.family([(view.labels, grammars.num_pending if grammars else 0)])
    times = grammars.compile_times.copy() if grammars else {}
    yield _COMPILES.histogram_family(((*view.labels, *key), found) for key, found in times.items())
    yield _HASHING.family([(view.labels, core.hash_times.total if core else 0)])
    residency = core.scheduler.kv_cache_manager.pool.residency if core else None
    if residency is not None:
        for row, read in RESIDENCY.items():
            yield row.histogram_family([(view.labels, read(residency))])


def _memory(view: EngineView) -> dict[str, float]:
    if view.proc is None:
        return {"weights": 0, "kv_cache": 0}
    core, asleep = view.proc.core, view.proc.utilities.sleep_state.asleep
    weight_bytes = core.config.model_info.weight_bytes
    kv_cache_bytes = core.config.num_blocks * core.config.block_size * core.config.model_info.kv_bytes_per_token
    found: dict[str, float] = {
        "weights": 0 if WakeTag.WEIGHTS in asleep else weight_bytes,
        "kv_cache": 0 if WakeTag.KV_CACHE in asleep else kv_cache_bytes,
    }
    look = view.memory.of(core.executor)
    if look.free_bytes is not None:
        found["free"] = look.free_bytes
    if look.peak_bytes is not None:
        found["activations"] = max(0, look.peak_bytes - weight_bytes - kv_cache_bytes)
    return found


def _config(config: ResolvedConfig) -> tuple[str, ...]:
    info = config.model_info
    limits = (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens)
    return (info.architecture, info.dtype, info.implementation, config.scheduling_policy.value, *map(str, limits))


def _cache_config(view: EngineView, config: ResolvedConfig) -> tuple[str, ...]:
    return (
        str(config.block_size),
        str(config.num_blocks),
        config.model_info.dtype,
        str(config.enable_prefix_caching),
        str(view.gpu_memory_utilization),
    )
