"""Logging of both services: standard library, to stderr, readable lines or one JSON object a line, faults once in full.

Called once from each composition root, before any other thread starts. Log calls pass lazy arguments; prompts and
outputs are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from opentelemetry import trace

from stepwire.repeats import RepeatHandler

Format = Literal["text", "json"]

_process_fields: dict[str, str] = {}
_request_id: ContextVar[str] = ContextVar("request_id", default="")
# Whatever a plain record has; the rest was given with `extra=` and becomes a field of the JSON object.
_STANDARD_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure(level: str, fmt: Format, service: str) -> None:
    """Replace the root logger's handlers. `service` names the process in JSON lines."""
    handler = RepeatHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if fmt == "json" else TextFormatter())
    handler.addFilter(add_context)
    logging.basicConfig(level=level, handlers=[handler], force=True)


def identify_process(**fields: str) -> None:
    """What tells this process from others of its service, in every JSON line from now on."""
    _process_fields.update(fields)


@contextmanager
def about_request(request_id: str) -> Iterator[None]:
    """Every line logged inside, by this task and those it starts, carries the id."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def add_context(record: logging.LogRecord) -> bool:
    """A filter that lets all pass: puts the request and the trace that a line is about into its fields."""
    request_id = _request_id.get()
    if request_id:
        record.__dict__.setdefault("request_id", request_id)
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        record.__dict__.setdefault("trace_id", f"{span.trace_id:032x}")
        record.__dict__.setdefault("span_id", f"{span.span_id:016x}")
    return True


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO  frontend.server: message key=value`, in UTC."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the base class names it so
        line = super().formatMessage(record)
        return line + "".join(f" {key}={value}" for key, value in extra_fields(record).items())


class JsonFormatter(logging.Formatter):
    """One JSON object for each record, `extra` fields at the top level."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "service": self._service,
            **_process_fields,
            **extra_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def extra_fields(record: logging.LogRecord) -> dict[str, object]:
    """What the caller gave with `extra=`."""
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD_ATTRIBUTES}
