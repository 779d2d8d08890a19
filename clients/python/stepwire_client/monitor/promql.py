"""PromQL of panels. Pure.

Each series gets the variables that its labels allow: an engine's rows model and engine, a frontend's rows of requests
also the frontend, and the rest of a frontend's only that. `$__rate_interval` is Grafana's window of a rate.
"""

from __future__ import annotations

WINDOW = "$__rate_interval"
VARIABLES = ("$model", "$engine", "$frontend", WINDOW)

_ENGINE = 'model_name=~"$model",engine_id=~"$engine"'
_FRONTEND = 'instance=~"$frontend"'
# Rows of a frontend that are counted for each model and engine.
_OF_REQUESTS = (
    "stepwire_frontend_requests_finished",
    "stepwire_frontend_request_",
    "stepwire_frontend_time_to_first_token",
    "stepwire_frontend_inter_token_latency",
)
_OF_PROCESSES = (
    "process_",
    "stepwire_engine_core_gc_",
    "stepwire_engine_core_log_",
    "stepwire_engine_core_interpreter_",
)
_OF_ENGINES = (
    "stepwire_frontend_engine_",
    "stepwire_frontend_batch_gap",
)


def select(name: str, matchers: str = "") -> str:
    """The series `name` within the dashboard's variables and further label matchers."""
    labels = ",".join(part for part in (_variables(name), matchers) if part)
    return f"{name}{{{labels}}}" if labels else name


def total(name: str, by: str = "", matchers: str = "") -> str:
    """A gauge summed up."""
    return f"sum{_by(by)}({select(name, matchers)})"


def largest(name: str, by: str = "", matchers: str = "") -> str:
    """The largest of a gauge."""
    return f"max{_by(by)}({select(name, matchers)})"


def rate(name: str, by: str = "", matchers: str = "") -> str:
    """A counter's growth a second."""
    return f"sum{_by(by)}(rate({select(name, matchers)}[{WINDOW}]))"


def rate_together(*counters: tuple[str, str]) -> str:
    """Growth a second of several counters, (name, matchers) each; a missing one is none. No two share their labels."""
    return f"sum({' or '.join(f'rate({select(*counter)}[{WINDOW}])' for counter in counters)})"


def quantile(q: float, name: str, by: str = "", matchers: str = "") -> str:
    """Of a histogram, whose name is without `_bucket`."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', labels, matchers)})"


def mean(name: str, by: str = "", matchers: str = "") -> str:
    """Of a histogram; nothing where nothing was observed."""
    return ratio(rate(f"{name}_sum", by, matchers), rate(f"{name}_count", by, matchers))


def buckets(name: str, matchers: str = "") -> str:
    """Observations of a histogram by bucket within the window, for a heat map."""
    return f"sum by (le) (increase({select(f'{name}_bucket', matchers)}[{WINDOW}]))"


def ratio(part: str, whole: str) -> str:
    """Hidden, not 0 or NaN, while the whole is 0."""
    return f"{part} / ({whole} > 0)"


def nonzero(expr: str) -> str:
    """Without the series that are 0: for labels with many values of which few occur."""
    return f"{expr} > 0"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def _variables(name: str) -> str:
    if name.startswith("stepwire:"):
        # Recorded by deploy/prometheus, for each model.
        return 'model_name=~"$model"'
    if name.startswith(_OF_PROCESSES):
        return ""
    if name.startswith("stepwire_engine_core_"):
        return _ENGINE
    if name.startswith(_OF_REQUESTS):
        return f"{_ENGINE},{_FRONTEND}"
    if name.startswith(_OF_ENGINES):
        return f'engine_id=~"$engine",{_FRONTEND}'
    return _FRONTEND
