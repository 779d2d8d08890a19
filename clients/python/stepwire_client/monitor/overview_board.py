"""The dashboard of what users experience. Data only."""

from __future__ import annotations

from stepwire_client.monitor.faults import FAULTY_HTTP, FAULTY_RPCS, HTTP, RPCS, USERS_HTTP, USERS_RPCS
from stepwire_client.monitor.panel import Board, Kind, Panel, Query, Row, Unit
from stepwire_client.monitor.promql import buckets, nonzero, quantile, rate, rate_together, ratio, select, total

_F, _E = "stepwire_frontend_", "stepwire_engine_core_"


def percentiles(name: str) -> tuple[Query, ...]:
    """p50, p90 and p99 of a histogram."""
    return tuple(Query(quantile(q, name), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99))


_SERVICE = Row(
    "Service",
    (
        Panel(
            "RPCs by status",
            "RPCs that ended, by gRPC status; without health checks and reflection.",
            Unit.PER_SECOND,
            (Query(nonzero(rate(RPCS, "grpc_code", USERS_RPCS)), "{{grpc_code}}"),),
            Kind.STACKED,
        ),
        Panel(
            "Error ratio",
            "Share of RPCs that ended as INTERNAL, UNAVAILABLE, UNKNOWN or DATA_LOSS, and of HTTP requests as 500 or "
            "503: our faults, not the callers'.",
            Unit.RATIO,
            (
                Query(
                    ratio(
                        rate_together((RPCS, FAULTY_RPCS), (HTTP, FAULTY_HTTP)),
                        rate_together((RPCS, USERS_RPCS), (HTTP, USERS_HTTP)),
                    ),
                    "errors",
                ),
            ),
        ),
        Panel(
            "Requests in flight",
            "Requests that are being served, by client class.",
            Unit.COUNT,
            (Query(total(f"{_F}requests_in_flight", "client_class"), "{{client_class}}"),),
            Kind.STACKED,
        ),
        Panel(
            "Finished by reason",
            "Choices that ended; each is counted once, aborted and failed ones too.",
            Unit.PER_SECOND,
            (Query(rate(f"{_F}requests_finished_total", "finished_reason"), "{{finished_reason}}"),),
            Kind.STACKED,
        ),
        Panel(
            "Rejected by reason",
            "Requests refused before they generated anything: QUEUE_FULL is overload, INVALID_ARGUMENT a mistake.",
            Unit.PER_SECOND,
            (Query(nonzero(rate(f"{_F}requests_rejected_total", "reason")), "{{reason}}"),),
            Kind.STACKED,
            event="a request that is refused",
        ),
        Panel(
            "Aborted by reason",
            "Choices that the frontend ended in the engine: callers that went away, deadlines, stop strings.",
            Unit.PER_SECOND,
            (Query(rate(f"{_F}requests_aborted_total", "reason"), "{{reason}}"),),
            Kind.STACKED,
        ),
    ),
)
_LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From the arrival of a request to its first token, by the frontend's clock.",
            Unit.SECONDS,
            percentiles(f"{_F}time_to_first_token_seconds"),
        ),
        Panel(
            "Inter-token latency",
            "Between two token batches of one choice.",
            Unit.SECONDS,
            percentiles(f"{_F}inter_token_latency_seconds"),
        ),
        Panel(
            "Duration of a request",
            "From the arrival of a request to the end of its answer.",
            Unit.SECONDS,
            percentiles(f"{_F}request_duration_seconds"),
        ),
        Panel(
            "Admission time",
            "From the start of an RPC until the engine has queued its request (Accepted).",
            Unit.SECONDS,
            percentiles(f"{_F}admission_seconds"),
        ),
        Panel(
            "Time to first token, distribution",
            "First tokens by the time they took. A second band above the first is a queue.",
            Unit.SECONDS,
            (Query(buckets(f"{_F}time_to_first_token_seconds"), "{{le}}"),),
            Kind.HEATMAP,
        ),
        Panel(
            "Time per output token, distribution",
            "Mean time between the tokens of one request, first token excluded.",
            Unit.SECONDS,
            (Query(buckets(f"{_F}request_time_per_output_token_seconds"), "{{le}}"),),
            Kind.HEATMAP,
        ),
    ),
)
_THROUGHPUT = Row(
    "Throughput",
    (
        Panel(
            "Tokens a second",
            "Prompt tokens of completed prefills, and generated tokens.",
            Unit.TOKENS_PER_SECOND,
            (
                Query(rate(f"{_E}prompt_tokens_total"), "prompt"),
                Query(rate(f"{_E}generation_tokens_total"), "generation"),
            ),
        ),
        Panel(
            "Prompt tokens by source",
            "Where the KV of prompts came from: computed here, or found in the prefix cache.",
            Unit.TOKENS_PER_SECOND,
            (Query(rate(f"{_E}prompt_tokens_by_source_total", "source"), "{{source}}"),),
            Kind.STACKED,
        ),
        Panel(
            "HTTP requests by status",
            "Requests of the OpenAI-compatible port; 499 = the caller went away before an answer.",
            Unit.PER_SECOND,
            (Query(rate(f"{_F}http_requests_total", "status"), "{{status}}"),),
            Kind.STACKED,
            event="a request over HTTP",
        ),
    ),
)
_OBJECTIVES = Row(
    "Objectives",
    (
        Panel(
            "Burn rate of the first-token objective",
            "How fast the error budget of deploy/prometheus/rules.yaml is used up: 1 = exactly all of it in 30 days.",
            Unit.COUNT,
            (
                Query(select("stepwire:ttft_slow:burn_rate5m"), "5 minutes"),
                Query(select("stepwire:ttft_slow:burn_rate1h"), "1 hour"),
                Query(select("stepwire:ttft_slow:burn_rate6h"), "6 hours"),
            ),
        ),
        Panel(
            "Burn rate of the inter-token objective",
            "As above, for the time between tokens.",
            Unit.COUNT,
            (
                Query(select("stepwire:itl_slow:burn_rate5m"), "5 minutes"),
                Query(select("stepwire:itl_slow:burn_rate1h"), "1 hour"),
                Query(select("stepwire:itl_slow:burn_rate6h"), "6 hours"),
            ),
        ),
    ),
)
_SHAPE = Row(
    "Shape of requests",
    tuple(
        Panel(title, description, Unit.TOKENS, (Query(buckets(f"{_F}{name}"), "{{le}}"),), Kind.HEATMAP)
        for title, description, name in (
            ("Prompt length", "Prompt tokens of a request.", "request_prompt_tokens"),
            ("Answer length", "Output tokens of a request, over all its choices.", "request_generation_tokens"),
            ("Longest choice", "Output tokens of a request's longest choice.", "request_max_generation_tokens"),
            ("max_tokens", "Most output tokens that a request asked for.", "request_max_tokens"),
            ("Choices", "Choices (n) that a request asked for.", "request_choices"),
        )
    ),
)

BOARD = Board(
    uid="stepwire-overview",
    title="stepwire: what users experience",
    description="Requests, errors, latency and throughput of a stepwire service.",
    rows=(_SERVICE, _LATENCY, _THROUGHPUT, _OBJECTIVES, _SHAPE),
)
