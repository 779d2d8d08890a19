"""The load of the engine that answered, in ORCA's form, for callers that ask for it. Pure.

What it says was reported by the engine with its last step: nothing is computed for a request. Names and forms are those
of xds.data.orca.v3.OrcaLoadReport, as Envoy and the gateways that balance by load read them.
"""

from __future__ import annotations

import base64
import enum
import json
import struct
from collections.abc import Mapping

from frontend.api.answering import HasMetadata, metadata_of
from frontend.generation import Generation
from stepwire.errors import InvalidRequestError

FORMAT_KEY = "endpoint-load-metrics-format"
_KEY = "endpoint-load-metrics"
# Field numbers of OrcaLoadReport.
_NAMED_METRICS = 8
_APPLICATION_UTILIZATION = 9


class LoadFormat(enum.Enum):
    """Forms of a report."""

    TEXT = "text"
    JSON = "json"
    BIN = "bin"


def load_format_of(context: HasMetadata) -> LoadFormat | None:
    """What the caller has asked for; None = no report. Raises InvalidRequestError for a form that is none."""
    value = metadata_of(context, FORMAT_KEY)
    if not value:
        return None
    try:
        return LoadFormat(value.lower())
    except ValueError:
        raise InvalidRequestError.of_field(FORMAT_KEY, "neither text, json nor bin") from None


def load_trailers(form: LoadFormat | None, generation: Generation) -> tuple[tuple[str, str | bytes], ...]:
    """The report as trailing metadata; nothing unless it was asked for, or when the engine is gone."""
    metrics = _metrics(generation) if form is not None else None
    if metrics is None:
        return ()
    if form is LoadFormat.BIN:
        return ((f"{_KEY}-bin", _to_bytes(metrics, _utilization(metrics, generation))),)
    return ((_KEY, _to_text(form, metrics, _utilization(metrics, generation))),)


def load_headers(form: LoadFormat | None, generation: Generation) -> dict[str, str]:
    """The same for HTTP, where bytes travel in base64."""
    return {
        name: value if isinstance(value, str) else base64.b64encode(value).decode("ascii")
        for name, value in load_trailers(form, generation)
    }


def _metrics(generation: Generation) -> dict[str, float] | None:
    load = generation.engine_load
    if load is None:
        return None
    return {
        "kv_cache_usage": round(load.kv_cache_usage, 4),
        "requests_running": load.running,
        "requests_waiting": load.waiting,
        "queued_prompt_tokens": load.waiting_tokens,
    }


def _utilization(metrics: Mapping[str, float], generation: Generation) -> float:
    """The scarcer of the two things that an engine runs out of."""
    places = generation.engine.max_num_seqs if generation.engine else 0
    return max(metrics["kv_cache_usage"], round(metrics["requests_running"] / places, 4) if places else 0.0)


def _to_text(form: LoadFormat | None, metrics: Mapping[str, float], utilization: float) -> str:
    if form is LoadFormat.JSON:
        return "JSON " + json.dumps({"application_utilization": utilization, "named_metrics": dict(metrics)})
    named = ",".join(f"named_metrics.{name}={value:g}" for name, value in metrics.items())
    return f"TEXT application_utilization={utilization:g},{named}"


def _to_bytes(metrics: Mapping[str, float], utilization: float) -> bytes:
    """The message as protobuf writes it; for two fields its package is not worth a dependency."""
    entries = b"".join(
        _bytes_field(_NAMED_METRICS, _bytes_field(1, name.encode()) + _double_field(2, value))
        for name, value in metrics.items()
    )
    return entries + _double_field(_APPLICATION_UTILIZATION, utilization)


def _bytes_field(number: int, value: bytes) -> bytes:
    """Of less than 128 bytes, whose length takes one."""
    return bytes((number << 3 | 2, len(value))) + value


def _double_field(number: int, value: float) -> bytes:
    return bytes((number << 3 | 1,)) + struct.pack("<d", value)
