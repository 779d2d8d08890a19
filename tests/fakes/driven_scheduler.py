"""A scheduler driven step by step with a ShadowWorker, under a clock that the test moves."""

from __future__ import annotations

from typing import Any

from engine_core.scheduler.output import EngineCoreOutput, NewRequestData
from engine_core.scheduler.request import Request, RequestStatus
from engine_core.scheduler.scheduler import Scheduler
from fakes.request_factory import make_scheduler, request_key
from fakes.shadow_worker import ShadowWorker


def token_100_plus_i(data: NewRequestData, token_ids: list[int]) -> int:
    return 100 + len(token_ids) - len(data.prompt_token_ids)


class DrivenScheduler:
    """Output token i of every request is 100 + i."""

    def __init__(self, **arguments: Any) -> None:
        self.scheduler: Scheduler = make_scheduler(**arguments)
        self.worker = ShadowWorker(self.scheduler.kv_cache_manager.layout, token_100_plus_i)
        self.now = 0.0
        self.scheduled: list[dict[int, int]] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            assert self.scheduler.add_request(request, self.now).finish is None

    def step(self) -> dict[int, EngineCoreOutput]:
        """One step; outputs by handle. What was scheduled is the last of `scheduled`."""
        step = self.scheduler.schedule(self.now)
        self.scheduled.append({key[1]: num_tokens for key, num_tokens in step.num_scheduled_tokens.items()})
        outputs = self.scheduler.take_expired_outputs()
        outputs += self.scheduler.update_from_output(step, self.worker.execute(step), self.now)
        assert self.scheduler.check_integrity() == []
        return {output.key[1]: output for output in outputs}

    def run(self) -> dict[int, list[int]]:
        """Step until idle; the tokens of each handle."""
        tokens: dict[int, list[int]] = {}
        while self.scheduler.has_work:
            for handle, output in self.step().items():
                tokens.setdefault(handle, []).extend(output.new_token_ids)
        assert self.worker.requests == {}
        assert self.scheduler.stats().num_used_blocks == 0
        return tokens

    def abort(self, *handles: int) -> list[EngineCoreOutput]:
        return self.scheduler.finish_requests(
            [request_key(handle) for handle in handles], RequestStatus.FINISHED_ABORTED
        )
