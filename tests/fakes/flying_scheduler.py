"""A scheduler with several steps in flight, planned and landed as the test says, checked after each move."""

from __future__ import annotations

from collections import deque
from typing import Any

from engine_core.scheduler.output import SchedulerOutput
from engine_core.scheduler.request import Request
from fakes.driven_scheduler import DrivenScheduler


class FlyingScheduler(DrivenScheduler):
    """`plan` starts a step, `land` takes in the oldest one."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.flights: deque[SchedulerOutput] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.requests: list[Request] = []

    def add(self, *requests: Request) -> None:
        super().add(*requests)
        self.requests.extend(requests)

    def plan(self) -> dict[int, int]:
        """Scheduled tokens by handle; an empty plan starts nothing."""
        step = self.scheduler.schedule(self.now)
        if not step.is_empty:
            self.flights.append(step)
        self.check()
        return {key[1]: num_tokens for key, num_tokens in step.num_scheduled_tokens.items()}

    def land(self) -> None:
        step = self.flights.popleft()
        for output in self.scheduler.update_from_output(step, self.worker.execute(step), self.now):
            self.tokens.setdefault(output.key[1], []).extend(output.new_token_ids)
        self.check()

    def fly(self, max_in_flight: int) -> None:
        """What EngineCore does in one step: plan while there is room, land when there is none."""
        has_planned = self.scheduler.has_work and bool(self.plan())
        if self.flights and (len(self.flights) == max_in_flight or not has_planned):
            self.land()

    def check(self) -> None:
        """Every counter of tokens in flight is that of the flights, also of requests that have ended."""
        assert self.scheduler.check_integrity() == []
        assert all(request.num_in_flight_tokens >= 0 for request in self.requests)
