"""Series with which each alert of deploy/prometheus fires, and near ones with which it must not: a table.

Values are in promtool's notation, one every 30 s: `0x10` stays, `0+5x10` grows, `_x4` is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

Series = dict[str, str]

_F, _E = "stepwire_frontend_", "stepwire_engine_core_"
_FE = '{job="stepwire-frontend",instance="f"'
_ENGINE = '{job="stepwire-engine-core",instance="e:9101",engine_id="e",model_name="m"'
_UP = f'{_F}engine_up{_FE},engine_id="e"}}'
_BUILD = f"{_F}build_info{_FE}}}"
_DEATHS = f'{_F}engine_deaths_total{_FE},engine_id="e",kind="reported"'
_RUNNING, _WAITING = f"{_E}requests_running{_ENGINE}}}", f"{_E}requests_waiting{_ENGINE}}}"
_STEPS = f'{_E}steps_total{_ENGINE},kind="decode"}}'
_STEP_AGE = f"{_E}step_age_seconds{_ENGINE}}}"
_PAUSED = f'{_E}state{_ENGINE},state="paused"}}'
_STARTING, _DRAINING = (f'{_E}state{_ENGINE},state="{state}"}}' for state in ("starting", "draining"))
_OLDEST = f"{_E}oldest_waiting_seconds{_ENGINE}}}"
_USAGE, _PREEMPTIONS = f"{_E}kv_cache_usage_ratio{_ENGINE}}}", f"{_E}preemptions_total{_ENGINE}}}"
_FINISHED = f'{_F}requests_finished_total{_FE},model_name="m",engine_id="e",finished_reason="stop"}}'
_TTFT = f'{_F}time_to_first_token_seconds_%s{_FE},model_name="m",engine_id="e"%s}}'
_ITL = f'{_F}inter_token_latency_seconds_%s{_FE},model_name="m",engine_id="e"%s}}'
_OUTBOX = f'{_E}outbox_bytes{_ENGINE},client_id="c"}}'
_COALESCED = f"{_E}batches_coalesced_total{_ENGINE}}}"
_MEMORY = f"process_resident_memory_bytes{_FE}}}"
_EXPIRY = f"{_F}tls_certificate_expiry_timestamp_seconds{_FE}}}"


@dataclass(frozen=True, slots=True)
class AlertCase:
    """`fires` within `minutes`, with `severity`; none of `silent` fires at any time until then."""

    alert: str
    severity: str
    fires: Series
    silent: tuple[Series, ...]
    minutes: int = 15


def _rpcs(ok: str, failed: str, method: str = "/stepwire.v1.GenerationService/Generate") -> Series:
    series = f'{_F}rpcs_handled_total{_FE},grpc_method="{method}",grpc_code="%s"}}'
    return {series % "OK": ok, series % "UNAVAILABLE": failed}


def _http(ok: str, failed: str, *, handler: str = "/v1/completions", fault: str = "503") -> Series:
    series = f'{_F}http_requests_total{_FE},method="POST",handler="{handler}",status="%s"}}'
    return {series % "200": ok, series % fault: failed}


def _rejected(reason: str, values: str) -> Series:
    return {f'{_F}requests_rejected_total{_FE},client_class="other",reason="{reason}"}}': values}


def _latency(name: str, bound: str, fast: str, all_: str) -> Series:
    return {name % ("bucket", f',le="{bound}"'): fast, name % ("count", ""): all_}


def _pauses(name: str, bound: str, labels: str = "") -> Series:
    """A histogram of which everything lies below `bound`."""
    bounds = ("0.01", "0.02", "0.05", "0.1", "0.25", "+Inf")
    return {
        f'{name}_bucket{_FE},le="{other}"{labels}}}': "0+10x60" if place >= bounds.index(bound) else "0x60"
        for place, other in enumerate(bounds)
    }


CASES = (
    AlertCase(
        "StepwireEngineDown",
        "page",
        {_UP: "0x30"},
        (
            {_UP: "1x30"},
            {_UP: "1x5 0x1 1x20"},
            # A roll-out: it drains, is away for a scrape, loads for long.
            {_UP: "1x4 0x26", _DRAINING: "0x4 1x3 0x1 _x22", _STARTING: "_x8 0x1 1x21"},
        ),
    ),
    AlertCase(
        "StepwireEngineDown",
        "page",
        # Another one loads, and one of the same name elsewhere; this one loaded and died.
        {
            _UP: "0x30",
            _STARTING: "1x4 _x26",
            _STARTING.replace('"e"', '"e2"'): "1x30",
            _STARTING.replace("{", '{namespace="other",'): "1x30",
        },
        ({_UP: "1x30"},),
    ),
    AlertCase(
        "StepwireEngineStalled",
        "page",
        {_RUNNING: "1x30", _WAITING: "0x30", _STEPS: "7x30"},
        (
            {_RUNNING: "1x30", _WAITING: "0x30", _STEPS: "0+5x30"},
            # Idle.
            {_RUNNING: "0x30", _WAITING: "0x30", _STEPS: "7x30"},
            {_RUNNING: "1x30", _WAITING: "3x30", _STEPS: "7x30", _PAUSED: "1x30"},
        ),
    ),
    AlertCase("StepwireEngineStalled", "page", {_STEP_AGE: "0x4 1+30x20"}, ({_STEP_AGE: "29x30"},)),
    AlertCase(
        "StepwireEngineDied",
        "page",
        {f'{_DEATHS},cause="EXECUTOR_FAILED"}}': "0x6 1x24"},
        ({f'{_DEATHS},cause="EXECUTOR_FAILED"}}': "1x30"},),
    ),
    AlertCase(
        "StepwireEngineDied",
        "page",
        # A cause that the frontend does not know has no series before its first death.
        {f'{_DEATHS},cause="STEP_FAILED"}}': "0x30", f'{_DEATHS},cause="8"}}': "_x6 1x24"},
        ({f'{_DEATHS},cause="STEP_FAILED"}}': "0x30"},),
    ),
    AlertCase("StepwireNoEngineServing", "page", {_UP: "0x30", _BUILD: "1x30"}, ({_UP: "1x30", _BUILD: "1x30"},)),
    AlertCase(
        "StepwireNoEngineServing",
        "page",
        # It knows no engine at all.
        {_BUILD: "1x30"},
        ({_UP: "0x30", _UP.replace('"e"', '"e2"'): "1x30", _BUILD: "1x30"},),
    ),
    AlertCase(
        "StepwireQueueGrowing",
        "ticket",
        {_OLDEST: "31x30"},
        ({_OLDEST: "29x30"}, {_OLDEST: "60x30", _PAUSED: "1x30"}, {_OLDEST: "40x4 0x2 40x4 0x20"}),
    ),
    AlertCase(
        "StepwireKVPressure",
        "ticket",
        {_USAGE: "0.97x60", _PREEMPTIONS: "0+2x60"},
        # Full without a preemption is good use; preemptions of the past are past.
        ({_USAGE: "0.99x60", _PREEMPTIONS: "5x60"}, {_USAGE: "0.5x60", _PREEMPTIONS: "0+2x60"}),
        minutes=20,
    ),
    AlertCase(
        "StepwirePreemptionStorm",
        "ticket",
        # Many are refused meanwhile, which says nothing about those that ran.
        {_PREEMPTIONS: "0+3x60", _FINISHED: "0+10x60", _FINISHED.replace("stop", "rejected"): "0+90x60"},
        ({_PREEMPTIONS: "0+1x60", _FINISHED: "0+10x60"},),
        minutes=20,
    ),
    AlertCase(
        "StepwireHashCollision",
        "page",
        {f"{_E}kv_hash_collisions_total{_ENGINE}}}": "0x6 1x24"},
        ({f"{_E}kv_hash_collisions_total{_ENGINE}}}": "0x30"},),
    ),
    AlertCase(
        "StepwireHighErrorRatio",
        "page",
        _rpcs("0+97x30", "0+3x30"),
        (
            _rpcs("0+99x30", "0+1x30"),
            # A frontend that says NOT_SERVING to probes fails nobody's request.
            _rpcs("0x30", "0+9x30", "/grpc.health.v1.Health/Check"),
        ),
    ),
    AlertCase(
        "StepwireHighErrorRatio",
        "page",
        {**_rpcs("0x30", "0x30"), **_http("0+97x30", "0+3x30")},
        (
            # Both kinds of calls are one whole.
            {**_rpcs("0+99x30", "0x30"), **_http("0x30", "0+1x30")},
            {**_rpcs("0x30", "0x30"), **_http("0+97x30", "0+3x30", fault="504")},
            {**_rpcs("0x30", "0x30"), **_http("0x30", "0+9x30", handler="/health")},
        ),
    ),
    AlertCase(
        "StepwireRejecting",
        "ticket",
        _rejected("QUEUE_FULL", "0+1x30"),
        (_rejected("QUEUE_FULL", "8x30"), _rejected("INVALID_ARGUMENT", "0+5x30")),
    ),
    AlertCase(
        "StepwireTTFTHigh",
        "page",
        _latency(_TTFT, "2.5", "0+80x150", "0+100x150"),
        (_latency(_TTFT, "2.5", "0+99x150", "0+100x150"), _latency(_TTFT, "2.5", "0x150", "0x150")),
        minutes=70,
    ),
    AlertCase(
        "StepwireTTFTHigh",
        "ticket",
        _latency(_TTFT, "2.5", "0+92x900", "0+100x900"),
        # Bad for an hour, well since: 6 h remember it, 30 min do not.
        (_latency(_TTFT, "2.5", "0+100x780 78000x20", "0+100x900"),),
        minutes=400,
    ),
    AlertCase(
        "StepwireITLHigh",
        "page",
        _latency(_ITL, "0.2", "0+80x150", "0+100x150"),
        (_latency(_ITL, "0.2", "0+99x150", "0+100x150"),),
        minutes=70,
    ),
    AlertCase(
        "StepwireITLHigh",
        "ticket",
        _latency(_ITL, "0.2", "0+92x900", "0+100x900"),
        (_latency(_ITL, "0.2", "0+95x900", "0+100x900"),),
        minutes=400,
    ),
    AlertCase(
        "StepwireSlowClients",
        "ticket",
        {f"{_F}slow_client_cuts_total{_FE}}}": "0+1x30"},
        ({f"{_F}slow_client_cuts_total{_FE}}}": "0x4 1x10 2x20"},),
    ),
    AlertCase(
        "StepwireOutputErrors",
        "ticket",
        {f'{_F}output_processing_errors_total{_FE},stage="detokenize"}}': "0+1x30"},
        ({f'{_F}output_processing_errors_total{_FE},stage="detokenize"}}': "3x30"},),
    ),
    AlertCase(
        "StepwireSlowFrontend",
        "ticket",
        {_OUTBOX: "20000000x30"},
        ({_OUTBOX: "10000000x30"},),
    ),
    # A step in three may meet a busy moment; and a count of the past is no news, whether steps go on or not.
    AlertCase(
        "StepwireSlowFrontend",
        "ticket",
        {_COALESCED: "0+120x30", _STEPS: "0+150x30"},
        (
            {_COALESCED: "0+50x30", _STEPS: "0+150x30"},
            {_COALESCED: "500x30", _STEPS: "0+150x30"},
            {_COALESCED: "500x30", _STEPS: "900x30"},
        ),
    ),
    AlertCase(
        "StepwireSessionFlapping",
        "ticket",
        {f'{_F}engine_reconnects_total{_FE},engine_id="e",result="new_boot"}}': "0+1x30"},
        ({f'{_F}engine_reconnects_total{_FE},engine_id="e",result="new_boot"}}': "0x4 1x10 2x20"},),
    ),
    AlertCase(
        "StepwireBatchGap",
        "page",
        {f'{_F}batch_gap_total{_FE},engine_id="e"}}': "0x6 2x24"},
        ({f'{_F}batch_gap_total{_FE},engine_id="e"}}': "0x30"},),
    ),
    AlertCase("StepwireMetricsAbsent", "page", {_BUILD: "1x30"}, ({_BUILD: "1x30", _STEPS: "0x30"},)),
    AlertCase("StepwireMetricsAbsent", "page", {_STEPS: "1x30"}, ({_BUILD: "1x30", _STEPS: "0x4 _x4 0x30"},)),
    AlertCase(
        "StepwireScrapeFailing",
        "ticket",
        {f"up{_FE}}}": "0x30"},
        # Somebody else's target is none of our business.
        ({f"up{_FE}}}": "1x30"}, {'up{job="node",instance="n"}': "0x30"}, {f"up{_FE}}}": "1x4 0 1x20"}),
    ),
    AlertCase(
        "StepwireGCPause",
        "ticket",
        _pauses(f"{_F}gc_pause_seconds", "0.1", ',generation="2"'),
        (_pauses(f"{_F}gc_pause_seconds", "0.02", ',generation="2"'),),
        minutes=20,
    ),
    AlertCase(
        "StepwireGCPause",
        "ticket",
        _pauses(f"{_E}gc_pause_seconds", "0.25", ',generation="2"'),
        (_pauses(f"{_E}gc_pause_seconds", "0.01", ',generation="0"'),),
        minutes=20,
    ),
    AlertCase(
        "StepwireEventLoopLag",
        "ticket",
        _pauses(f"{_F}event_loop_lag_seconds", "0.25"),
        (_pauses(f"{_F}event_loop_lag_seconds", "0.05"),),
    ),
    AlertCase(
        "StepwireMemoryGrowth",
        "ticket",
        {_MEMORY: "1000000000+10000000x240"},
        ({_MEMORY: "1000000000x240"}, {_MEMORY: "1000000000+1000000x240"}),
        minutes=60,
    ),
    AlertCase(
        "StepwireCertificateExpiry",
        "ticket",
        {_EXPIRY: "500000x200"},
        # Eight days, and the test begins at 0.
        ({_EXPIRY: "700000x200"},),
        minutes=70,
    ),
)
