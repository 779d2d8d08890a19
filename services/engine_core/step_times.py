"""What the loop notes of its steps: how long each phase took, what kind of step it was, how full it was.

Plain integers, written by the busy-loop thread and read by a scrape. A step costs a few clock calls and searches,
whatever is in it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from engine_core.scheduler.output import SchedulerOutput
from stepwire.histogram import Histogram
from stepwire.metrics import FAST_BUCKETS

ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
RATIO_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class StepKind(enum.Enum):
    """What a step computed."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    # The workers were only told of ends.
    EMPTY = "empty"


def kind_of(scheduler_output: SchedulerOutput) -> StepKind:
    """By tokens: whoever gets one decodes, and the last token of a prompt that is cut there looks the same."""
    scheduled = scheduler_output.num_scheduled_tokens
    if not scheduled:
        return StepKind.EMPTY
    if scheduler_output.total_num_scheduled_tokens == len(scheduled):
        return StepKind.DECODE
    return StepKind.PREFILL if min(scheduled.values()) > 1 else StepKind.MIXED


@dataclass(frozen=True, slots=True)
class StepStamps:
    """When a step began, was planned, was with the executor, and was to be sampled: seconds of the engine's clock."""

    began: float
    planned: float
    handed_over: float
    sampled: float


# Called by the busy loop with when the results were there and when they were taken in.
StepListener = Callable[[SchedulerOutput, StepStamps, float, float], None]


class StepTimes:
    """One for each engine core. The phases of a step are observed once each, also where two steps overlap."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.schedule = Histogram(FAST_BUCKETS)
        # Handing the step to the executor, and waiting for its results.
        self.execute = Histogram(FAST_BUCKETS)
        # The masks of grammars, and starting to sample.
        self.sample = Histogram(FAST_BUCKETS)
        self.update = Histogram(FAST_BUCKETS)
        # Handing what the step brought to the outboxes.
        self.output = Histogram(FAST_BUCKETS)
        self.durations = {kind: Histogram(FAST_BUCKETS) for kind in StepKind}
        self.tokens = Histogram(ITERATION_BUCKETS)
        self.occupancy = Histogram(RATIO_BUCKETS)
        self.budget_used = Histogram(RATIO_BUCKETS)

    @property
    def phases(self) -> dict[str, Histogram]:
        """By the names they are served under."""
        return {
            "schedule": self.schedule,
            "execute": self.execute,
            "sample": self.sample,
            "update": self.update,
            "output": self.output,
        }

    def note_step(self, scheduler_output: SchedulerOutput, duration_s: float) -> None:
        """A step is over."""
        self.durations[kind_of(scheduler_output)].observe(duration_s)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if num_tokens:
            self.tokens.observe(num_tokens)
            self.occupancy.observe(len(scheduler_output.num_scheduled_tokens) / self._max_num_seqs)
            self.budget_used.observe(num_tokens / self._max_num_batched_tokens)
