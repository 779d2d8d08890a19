"""Log lines: text and JSON, extra fields, exceptions."""

from __future__ import annotations

import json
import logging
import sys

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from stepwire import log
from stepwire.log import JsonFormatter, TextFormatter, about_request, add_context, identify_process


def record(message: str = "hello %s", *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("stepwire.test", logging.WARNING, __file__, 1, message, args or ("world",), None)
    made.created, made.msecs = 0.25, 250.0
    made.__dict__.update(extra)
    return made


def test_text_has_utc_time_level_logger_message_and_fields():
    line = TextFormatter().format(record(request_id="r1"))
    assert line == "1970-01-01 00:00:00.250 WARNING stepwire.test: hello world request_id=r1"


def test_json_is_one_object_a_line_with_fields():
    line = JsonFormatter("frontend").format(record("two\nlines %s", 5, request_id="r1", odd=object()))
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["time"] == "1970-01-01T00:00:00.250Z"
    assert (entry["level"], entry["logger"], entry["service"]) == ("WARNING", "stepwire.test", "frontend")
    assert entry["message"] == "two\nlines 5"
    assert entry["request_id"] == "r1"


def test_json_carries_the_traceback():
    made = record()
    try:
        raise ValueError("boom")
    except ValueError:
        made.exc_info = sys.exc_info()
    entry = json.loads(JsonFormatter("x").format(made))
    assert "ValueError: boom" in entry["exception"]


def test_lines_about_a_request_carry_its_id_and_its_trace():
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1)))
    made, other = record(), record(request_id="own")
    with about_request("r7"), trace.use_span(span):
        assert add_context(made)
        add_context(other)
    entry = json.loads(JsonFormatter("x").format(made))
    assert entry["request_id"] == "r7"
    assert (entry["trace_id"], entry["span_id"]) == (f"{0xABC:032x}", f"{0xDEF:016x}")
    assert json.loads(JsonFormatter("x").format(other))["request_id"] == "own"


def test_lines_about_nothing_in_particular_have_no_id():
    made = record()
    add_context(made)
    assert {"request_id", "trace_id"}.isdisjoint(json.loads(JsonFormatter("x").format(made)))


def test_json_lines_tell_processes_of_a_service_apart(monkeypatch):
    monkeypatch.setattr(log, "_process_fields", {})
    identify_process(engine_id="engine-3")
    assert json.loads(JsonFormatter("x").format(record()))["engine_id"] == "engine-3"
    assert "engine-3" not in TextFormatter().format(record())
