"""One step while it is being planned: the token budget left, and what was handed out so far."""

from __future__ import annotations

from engine_core.kv_cache.kv_cache_manager import BlockIds
from engine_core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from engine_core.scheduler.request import Request, RequestKey
from engine_core.scheduler.scheduler_config import SchedulerConfig


class StepPlan:
    """Grows request by request inside `Scheduler.schedule`, and becomes a SchedulerOutput."""

    def __init__(self, config: SchedulerConfig, step: int, token_budget: int, prefill_budget: int) -> None:
        self._config = config
        self.step = step
        self.token_budget = token_budget
        # What is left of the token budget for requests that miss several tokens, however many of them they get.
        self.prefill_budget = prefill_budget
        # A request did not get its blocks: whatever becomes free is for those that run already.
        self.is_short_of_blocks = False
        # Scheduled requests whose prompt will not be complete after this step.
        self.num_partial_prefills = 0
        self.grammar_keys: list[RequestKey] = []
        self._new_requests: list[NewRequestData] = []
        self._cached_requests: list[CachedRequestData] = []
        self._num_scheduled_tokens: dict[RequestKey, int] = {}

    def num_new_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """As many as the step has room for; 0 also while the tokens of a request wait for those in flight."""
        if request.must_wait_for_token(self._config.max_model_len):
            return 0
        num_new_tokens = request.num_tokens_in_sight - num_computed_tokens
        budget = self.token_budget if num_new_tokens == 1 else min(self.prefill_budget, self.token_budget)
        threshold = self._config.long_prefill_token_threshold
        # Without chunks a cap would keep a longer prompt out for ever.
        if 0 < threshold < num_new_tokens and self._config.enable_chunked_prefill:
            num_new_tokens = threshold
        return min(num_new_tokens, budget)

    def add_new(self, data: NewRequestData, num_tokens: int) -> None:
        self._new_requests.append(data)
        self._spend(data.key, num_tokens)

    def add_resumed(self, key: RequestKey, block_ids: BlockIds, num_computed_tokens: int, num_tokens: int) -> None:
        self._cached_requests.append(CachedRequestData(key, block_ids, num_computed_tokens, is_resumed=True))
        self._spend(key, num_tokens)

    def add_running(self, key: RequestKey, block_ids: BlockIds, num_computed_tokens: int, num_tokens: int) -> None:
        if block_ids:
            self._cached_requests.append(CachedRequestData(key, block_ids, num_computed_tokens))
        # Not through _spend: a call for each running request is felt.
        self._num_scheduled_tokens[key] = num_tokens
        self.token_budget -= num_tokens

    def finish(self, finished_keys: list[RequestKey]) -> SchedulerOutput:
        return SchedulerOutput(
            step=self.step,
            new_requests=self._new_requests,
            cached_requests=self._cached_requests,
            num_scheduled_tokens=self._num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self._num_scheduled_tokens.values()),
            finished_keys=finished_keys,
            grammar_keys=self.grammar_keys,
        )

    def _spend(self, key: RequestKey, num_tokens: int) -> None:
        self._num_scheduled_tokens[key] = num_tokens
        self.token_budget -= num_tokens
