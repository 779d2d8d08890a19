"""The dashboard of the engine core's inside. Data only."""

from __future__ import annotations

from stepwire_client.monitor.panel import Board, Kind, Panel, Query, Row, Unit
from stepwire_client.monitor.promql import (
    buckets,
    largest,
    mean,
    nonzero,
    quantile,
    rate,
    ratio,
    select,
    total,
)

_E = "stepwire_engine_core_"
_PHASES = f"{_E}step_phase_seconds_sum"

_LOAD = Row(
    "Load",
    (
        Panel(
            "Running and waiting",
            "Requests in the running batch, and those that wait for room or for a grammar, on each engine.",
            Unit.COUNT,
            (
                Query(total(f"{_E}requests_running", "engine_id"), "{{engine_id}} running"),
                Query(total(f"{_E}requests_waiting", "engine_id"), "{{engine_id}} waiting"),
            ),
        ),
        Panel(
            "Waiting by reason",
            "capacity: no room in the batch or the KV cache. deferred: a grammar is being compiled.",
            Unit.COUNT,
            (Query(total(f"{_E}requests_waiting_by_reason", "reason"), "{{reason}}"),),
            Kind.STACKED,
        ),
        Panel(
            "Oldest waiting request",
            "Age of the oldest request that was never scheduled. It grows while demand is above capacity.",
            Unit.SECONDS,
            (Query(largest(f"{_E}oldest_waiting_seconds", "engine_id"), "{{engine_id}}"),),
        ),
        Panel(
            "Queued prompt tokens",
            "All known tokens of the requests that wait, cached ones included; the best signal for an autoscaler.",
            Unit.TOKENS,
            (Query(total(f"{_E}queued_prompt_tokens", "engine_id"), "{{engine_id}}"),),
        ),
        Panel(
            "Batch occupancy",
            "Mean of running requests over --max-num-seqs, and of scheduled tokens over --max-num-batched-tokens.",
            Unit.RATIO,
            (
                Query(mean(f"{_E}batch_occupancy_ratio"), "requests"),
                Query(mean(f"{_E}token_budget_used_ratio"), "token budget"),
            ),
        ),
        Panel(
            "Tokens of a step",
            "Steps by the number of tokens they computed.",
            Unit.TOKENS,
            (Query(buckets(f"{_E}iteration_tokens"), "{{le}}"),),
            Kind.HEATMAP,
        ),
    ),
)
_TIME = Row(
    "Where time goes",
    (
        Panel(
            "Life of a request",
            "Mean time in the queue, in prefill and in decode, stacked.",
            Unit.SECONDS,
            tuple(Query(mean(f"{_E}request_{part}_seconds"), part) for part in ("queue", "prefill", "decode")),
            Kind.STACKED,
        ),
        Panel(
            "Phases of a step",
            "Seconds a second that the step loop spends in each phase; 1 = all of its time.",
            Unit.SECONDS,
            (Query(rate(_PHASES, "phase"), "{{phase}}"),),
            Kind.STACKED,
        ),
        Panel(
            "Share of the loop itself",
            "What of a step is not the model: 1 - execute / step.",
            Unit.RATIO,
            (Query("1 - " + ratio(rate(_PHASES, matchers='phase="execute"'), rate(_PHASES)), "loop"),),
        ),
        Panel(
            "Step duration p99",
            "By kind of step: prefill, decode, both (mixed), or nothing to compute (empty).",
            Unit.SECONDS,
            (Query(quantile(0.99, f"{_E}step_duration_seconds", "kind"), "{{kind}}"),),
        ),
        Panel(
            "Steps a second",
            "By kind. None while requests wait is a hang.",
            Unit.PER_SECOND,
            (Query(rate(f"{_E}steps_total", "kind"), "{{kind}}"),),
            Kind.STACKED,
        ),
        Panel(
            "Compiling a grammar p99",
            "p99 of the time to compile one. Its request waits meanwhile, and holds up nobody else.",
            Unit.SECONDS,
            (Query(quantile(0.99, f"{_E}grammar_compile_seconds", "kind"), "{{kind}}"),),
            event="a request with structured output",
        ),
    ),
)
_KV = Row(
    "KV cache",
    (
        Panel(
            "Usage",
            "Share of the KV blocks that requests hold. At 1 requests wait, or running ones are preempted.",
            Unit.RATIO,
            (Query(largest(f"{_E}kv_cache_usage_ratio", "engine_id"), "{{engine_id}}"),),
        ),
        Panel(
            "Blocks",
            "used: held by requests. cached: free, but with content that can be hit. free: empty.",
            Unit.COUNT,
            (Query(total(f"{_E}kv_blocks", "state"), "{{state}}"),),
            Kind.STACKED,
        ),
        Panel(
            "Prefix hit ratio",
            "Prompt tokens found in the prefix cache over those looked up.",
            Unit.RATIO,
            (
                Query(
                    ratio(rate(f"{_E}prefix_cache_hit_tokens_total"), rate(f"{_E}prefix_cache_query_tokens_total")),
                    "hits",
                ),
            ),
        ),
        Panel(
            "Evictions",
            "Cached blocks that were handed out again. Many of them with a low hit ratio: the cache is too small.",
            Unit.PER_SECOND,
            (Query(rate(f"{_E}kv_evictions_total", "engine_id"), "{{engine_id}}"),),
        ),
        Panel(
            "Preemptions",
            "Running requests whose blocks were taken away, to be computed again later.",
            Unit.PER_SECOND,
            (Query(rate(f"{_E}preemptions_total", "engine_id"), "{{engine_id}}"),),
        ),
        Panel(
            "Fenced blocks",
            "Freed, but a step in flight may still write to them.",
            Unit.COUNT,
            (Query(total(f"{_E}kv_fenced_blocks", "engine_id"), "{{engine_id}}"),),
        ),
    ),
)
_HEALTH = Row(
    "Health",
    (
        Panel(
            "State",
            "The state of each engine.",
            Unit.COUNT,
            (Query(f"{select(f'{_E}state')} == 1", "{{engine_id}} {{state}}"),),
            Kind.STATES,
        ),
        Panel(
            "Age of the running step",
            "0 between steps. The engine calls itself STALLED at --stall-warn-s and ends at --step-timeout-s.",
            Unit.SECONDS,
            (Query(largest(f"{_E}step_age_seconds", "engine_id"), "{{engine_id}}"),),
        ),
        Panel(
            "Requests ended early",
            "Refused, aborted or failed in the engine, by reason.",
            Unit.PER_SECOND,
            (
                Query(nonzero(rate(f"{_E}requests_rejected_total", "reason")), "rejected {{reason}}"),
                Query(rate(f"{_E}requests_aborted_total", "reason"), "aborted {{reason}}"),
                Query(rate(f"{_E}request_errors_total", "reason"), "failed {{reason}}"),
            ),
            event="a request that the engine refuses",
        ),
        Panel(
            "Device memory",
            "Weights and KV cache (0 while asleep), what steps took besides at their peak, and what is free.",
            Unit.BYTES,
            (Query(total(f"{_E}device_memory_bytes", "kind"), "{{kind}}"),),
            Kind.STACKED,
        ),
        Panel(
            "Start-up",
            "How long each phase of the last start took.",
            Unit.SECONDS,
            (Query(largest(f"{_E}startup_seconds", "phase"), "{{phase}}"),),
        ),
        Panel(
            "Operations",
            "Calls of operators, by call and result.",
            Unit.PER_SECOND,
            (Query(rate(f"{_E}utility_calls_total", "call, code"), "{{call}} {{code}}"),),
            event="a call of stepwire admin",
        ),
    ),
)

BOARD = Board(
    uid="stepwire-engine",
    title="stepwire: engine core",
    description="Scheduler, step loop and KV cache of each engine.",
    rows=(_LOAD, _TIME, _KV, _HEALTH),
)
