"""Where the step loop is: written by the loop, read by pongs, stats, metrics and the watchdog."""

from __future__ import annotations

from collections.abc import Callable


class StepProgress:
    """Plain attributes with one writer; a reader may see a step that has just ended, which is harmless."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started: float | None = None
        self.num_steps = 0
        self.last_step_s = 0.0
        self.last_step_tokens = 0
        # When the loop last got on with something.
        self.last_end = clock()

    def begin(self) -> None:
        self._started = self._clock()

    def end(self, num_steps: int, num_tokens: int | None) -> None:
        """`num_tokens` is None for a step without a forward pass, which says nothing about how long steps take."""
        self.last_end = self._clock()
        if self._started is not None and num_tokens is not None:
            self.last_step_s = self.last_end - self._started
            self.last_step_tokens = num_tokens
        self._started = None
        self.num_steps = num_steps

    def silence_s(self) -> float:
        """Time since the loop last completed a step, or looked after its utilities."""
        return max(0.0, self._clock() - self.last_end)

    def age_s(self) -> float:
        """Time since the running step began; 0 between steps."""
        started = self._started
        return 0.0 if started is None else self._clock() - started
