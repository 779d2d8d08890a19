"""What the loop notes of its steps: kinds, phases, how full they were."""

from __future__ import annotations

import pytest

from engine_core.scheduler.output import SchedulerOutput
from engine_core.step_times import StepKind, StepTimes, kind_of
from fakes.looped_engine import LoopedEngine


def step(*num_tokens: int) -> SchedulerOutput:
    scheduled = {("session", handle): number for handle, number in enumerate(num_tokens)}
    return SchedulerOutput(1, [], [], scheduled, sum(num_tokens), [])


@pytest.mark.parametrize(
    ("num_tokens", "kind"),
    [
        ((), StepKind.EMPTY),
        ((1,), StepKind.DECODE),
        ((1, 1, 1), StepKind.DECODE),
        ((5, 7), StepKind.PREFILL),
        ((1, 5), StepKind.MIXED),
    ],
)
def test_a_step_is_named_by_what_its_requests_get(num_tokens: tuple[int, ...], kind: StepKind) -> None:
    assert kind_of(step(*num_tokens)) is kind


def test_a_step_without_a_model_says_nothing_of_how_full_steps_are() -> None:
    times = StepTimes(max_num_seqs=4, max_num_batched_tokens=100)
    times.note_step(step(), 0.1)
    times.note_step(step(1, 49), 0.2)
    assert (times.tokens.count, times.tokens.total) == (1, 50)
    assert (times.occupancy.total, times.budget_used.total) == (0.5, 0.5)
    assert times.durations[StepKind.EMPTY].count == 1
    assert times.durations[StepKind.MIXED].total == 0.2


@pytest.mark.parametrize("is_async", [False, True])
def test_every_step_is_observed_once_in_every_phase(is_async: bool) -> None:
    engine = LoopedEngine(async_scheduling=is_async)
    for handle in (1, 2, 3):
        engine.add(handle, num_prompt=6, max_tokens=4 + handle)
    engine.run()
    times = engine.proc.core.times
    num_steps = sum(found.count for found in times.durations.values())
    assert num_steps == engine.proc.core.num_steps > 0
    assert {name: found.count for name, found in times.phases.items() if name != "output"} == dict.fromkeys(
        ("schedule", "execute", "sample", "update"), num_steps
    )
    # A step that only tells the workers of ends brings nothing to hand out.
    assert times.output.count == num_steps - times.durations[StepKind.EMPTY].count
    num_prompt, num_output = 3 * 6, 5 + 6 + 7
    # The last token of a request is never computed.
    assert times.tokens.total == num_prompt + num_output - 3
