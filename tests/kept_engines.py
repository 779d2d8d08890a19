"""Engines with the real model that outlive a test: to start one takes most of a short test."""

from __future__ import annotations

from free_ports import free_port
from running_stack import Service, Stack, wait_until_zero


class Engines:
    """Gives a test the engine that the test before has left, if it still runs. `flags` are those of every engine."""

    def __init__(self, stack: Stack, *flags: str) -> None:
        self._stack = stack
        self._flags = flags
        self._last: Service | None = None

    def take(self) -> Service:
        """One without a request."""
        if self._last is None or self._last.process.poll() is not None:
            return self.start(free_port())
        wait_until_zero(self._last, "stepwire_engine_core_requests_running")
        return self._last

    def start(self, port: int) -> Service:
        """A new one, which the next test is given."""
        self._last = self._stack.engine(*self._flags, port=port)
        return self._last
