"""Log lines: text and JSON, extra fields, exceptions."""

from __future__ import annotations

import json
import logging
import sys

from stepwire.log import JsonFormatter, TextFormatter


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
