"""One fault does not fill the log, and none is hidden."""

from __future__ import annotations

import io
import logging
import threading

import pytest

from stepwire.log import TextFormatter
from stepwire.repeats import MAX_SEEN, RepeatHandler


class Logged:
    """A logger of its own whose lines are kept, at times that the test sets."""

    def __init__(self, interval_s: float) -> None:
        self.now = 100.0
        self.stream = io.StringIO()
        self.handler = RepeatHandler(self.stream, interval_s, lambda: self.now)
        self.handler.setFormatter(TextFormatter())
        self.logger = logging.Logger("test")
        self.logger.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        """Without their times."""
        return [line.partition("test: ")[2] for line in self.stream.getvalue().splitlines() if "test: " in line]

    def fail(self, error: type[Exception] = ValueError, message: str = "%s failed", **extra: object) -> None:
        try:
            raise error("no")
        except error:
            self.logger.exception(message, "it", extra=extra)


@pytest.fixture
def logged() -> Logged:
    # Longer than the test.
    return Logged(3600)


def test_the_first_of_equal_failures_is_logged_in_full_and_repeats_are_counted(logged: Logged) -> None:
    for _ in range(1000):
        logged.fail()
    assert logged.lines == ["it failed"]
    assert logged.stream.getvalue().count("Traceback") == 1
    logged.now += 3600
    logged.fail(request_id="r7")
    assert len(logged.lines) == 2
    assert logged.lines[1].startswith("it failed again: ValueError at ")
    assert logged.lines[1].endswith("1001 times by now request_id=r7")
    assert logged.stream.getvalue().count("Traceback") == 1


def test_other_failures_and_other_lines_are_not_repeats(logged: Logged) -> None:
    logged.fail()
    logged.fail(KeyError)
    logged.fail(message="%s fails differently")
    for number in range(3):
        logged.logger.info("a line without a failure")
        logged.logger.warning("warning %d", number)
    plain = [line for number in range(3) for line in ("a line without a failure", f"warning {number}")]
    assert logged.lines == ["it failed", "it failed", "it fails differently", *plain]


def test_equal_warnings_are_counted_too(logged: Logged) -> None:
    for _ in range(5):
        logged.logger.warning("%d of them", 3)
    logged.now += 3600
    logged.logger.warning("%d of them", 3)
    assert logged.lines == ["3 of them", "3 of them again, 6 times by now"]


def test_warnings_that_always_differ_are_forgotten(logged: Logged) -> None:
    for number in range(MAX_SEEN + 1):
        logged.logger.warning("warning %d", number)
    logged.logger.warning("warning 0")
    assert logged.lines[-1] == "warning 0"
    assert len(logged.handler._seen) == MAX_SEEN


def test_the_request_that_meets_a_fault_makes_it_no_other_fault(logged: Logged) -> None:
    def meet(number: int) -> None:
        try:
            raise ValueError(f"of request {number}")
        except ValueError:
            logged.logger.exception("request %d failed", number)

    meet(1)
    meet(2)
    assert logged.lines == ["request 1 failed"]


def test_the_end_of_the_process_tells_what_is_counted(logged: Logged) -> None:
    for number in range(3):
        logged.fail(request_id=f"r{number}")
    logged.handler.close()
    logged.handler.close()
    assert len(logged.lines) == 2
    assert logged.lines[1].endswith("3 times by now request_id=r2")


def test_the_last_repeats_have_a_line_though_none_follows() -> None:
    logged, written = Logged(0.01), threading.Event()
    flush = logged.handler.flush

    def flushed() -> None:
        flush()
        if "again" in logged.stream.getvalue():
            written.set()

    logged.handler.flush = flushed
    # The time can not be over in between.
    with logged.handler.lock:
        for _ in range(5):
            logged.fail()
    assert written.wait(30)
    assert logged.lines[0] == "it failed"
    assert logged.lines[1].endswith("5 times by now")
    assert len(logged.lines) == 2
