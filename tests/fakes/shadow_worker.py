"""A worker without a model: keeps a worker's state from SchedulerOutput alone, and a shadow of the KV memory.

Each slot of the shadow remembers the digest of the token prefix whose KV was written there. Before a token is sampled
its whole context is read back through the block table, so a wrong table, a hit on foreign content, and a block that
was handed out while still in use all show as a mismatch. Any breach of the contract is an AssertionError.

The layers of each group write, and read what their window lets them see, through the table of their group.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_core.kv_cache.kv_cache_layout import KVCacheLayout
from engine_core.kv_cache.kv_cache_manager import BlockIds
from engine_core.scheduler.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine_core.scheduler.request import RequestKey
from fakes.worker_logprobs import fake_prompt, fake_sampled

# The next token of a request, from what it was added with and all its known tokens.
NextToken = Callable[[NewRequestData, list[int]], int]


@dataclass
class WorkerRequest:
    """One request as the worker knows it."""

    data: NewRequestData
    token_ids: list[int]
    # prefixes[i] stands for token_ids[: i + 1] under the request's salt.
    prefixes: list[int]
    # By group of layers.
    block_ids: list[list[int]]
    num_computed_tokens: int
    # Of a request that pools: those whose hidden states it has, since its prompt began.
    positions: list[int] = field(default_factory=list)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.prefixes.append(hash((self.prefixes[-1], token_id)))


class ShadowWorker:
    """Takes the place of an executor: `execute` a step, get its tokens."""

    def __init__(
        self, layout: KVCacheLayout, next_token: NextToken, salt_of: Callable[[RequestKey], str] = lambda key: ""
    ) -> None:
        self.requests: dict[RequestKey, WorkerRequest] = {}
        # Keys the scheduler has declared over, in order.
        self.finished_keys: list[RequestKey] = []
        self._block_size = layout.block_size
        self._groups = layout.groups
        self._next_token = next_token
        # Workers know no salt. The shadow does, so that a block shared by two tenants reads back wrong.
        self._salt_of = salt_of
        # The layers of a group have KV of their own: a block that belongs to another group reads back wrong.
        self._memory: dict[tuple[int, int], tuple[int, int]] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._drop_finished(step.finished_keys)
        for new in step.new_requests:
            self._add(new)
        for cached in step.cached_requests:
            self._update(cached)
        self._check_totals(step)
        # Every layer writes the KV of the whole batch before it attends: hence two loops.
        for key, num_tokens in step.num_scheduled_tokens.items():
            self._write(self.requests[key], num_tokens)
        for key, num_tokens in step.num_scheduled_tokens.items():
            self._read(key, num_tokens)
        keys = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(keys, [])
        for key in keys:
            self._add_prompt_logprobs(output, key, step.num_scheduled_tokens[key])
            self._pool(output, key, step.num_scheduled_tokens[key])
            output.sampled_token_ids.append(self._sample(key, step.num_scheduled_tokens[key]))
            self._add_logprobs(output, key, output.sampled_token_ids[-1])
        return output

    def _drop_finished(self, keys: list[RequestKey]) -> None:
        for key in keys:
            assert key in self.requests, f"{key} is declared over, but was never sent or is over already"
            del self.requests[key]
            self.finished_keys.append(key)

    def _add(self, data: NewRequestData) -> None:
        assert data.key not in self.requests, f"{data.key} was sent as new twice"
        assert data.key not in self.finished_keys, f"{data.key} was sent after its end"
        request = WorkerRequest(data, [], [zlib.crc32(self._salt_of(data.key).encode())], self._empty_tables(), 0)
        self._append_blocks(request, data.block_ids)
        for token_id in (*data.prompt_token_ids, *data.output_token_ids):
            request.append(token_id)
        del request.prefixes[0]
        request.num_computed_tokens = data.num_computed_tokens
        self.requests[data.key] = request

    def _update(self, data: CachedRequestData) -> None:
        assert data.key in self.requests, f"{data.key} is sent as known, but is not"
        assert data.is_resumed or any(data.new_block_ids), f"{data.key} is sent without news"
        request = self.requests[data.key]
        if data.is_resumed:
            request.block_ids = self._empty_tables()
            request.num_computed_tokens = data.num_computed_tokens
        else:
            assert request.num_computed_tokens == data.num_computed_tokens, f"{data.key}: computed tokens jumped"
        self._append_blocks(request, data.new_block_ids)

    def _empty_tables(self) -> list[list[int]]:
        return [[] for _ in self._groups]

    def _append_blocks(self, request: WorkerRequest, block_ids: BlockIds) -> None:
        assert len({len(group_ids) for group_ids in block_ids}) <= 1, f"{request.data.key}: tables of different lengths"
        if block_ids:
            for table, group_ids in zip(request.block_ids, block_ids, strict=True):
                table.extend(group_ids)

    def _check_totals(self, step: SchedulerOutput) -> None:
        sent = [data.key for data in (*step.cached_requests, *step.new_requests)]
        assert len(set(sent)) == len(sent), "a request was sent twice in a step"
        assert set(sent) <= step.num_scheduled_tokens.keys() <= self.requests.keys(), "scheduled and sent ones differ"
        assert sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens

    def _write(self, request: WorkerRequest, num_tokens: int) -> None:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        assert start < end <= len(request.token_ids), f"{request.data.key}: tokens [{start}, {end}) are not known"
        for group in range(len(self._groups)):
            for position in range(start, end):
                self._memory[self._slot(request, group, position)] = (group, request.prefixes[position])

    def _read(self, key: RequestKey, num_tokens: int) -> None:
        request = self.requests[key]
        for group, kind in enumerate(self._groups):
            window = kind.sliding_window
            # Of the step's first token, which looks back farthest.
            first = 0 if window is None else max(0, request.num_computed_tokens + 1 - window)
            for position in range(first, request.num_computed_tokens + num_tokens):
                found = self._memory.get(self._slot(request, group, position))
                assert found == (group, request.prefixes[position]), f"{key}: position {position} reads foreign KV"

    def _slot(self, request: WorkerRequest, group: int, position: int) -> tuple[int, int]:
        table, index = request.block_ids[group], position // self._block_size
        assert index < len(table), f"{request.data.key}: no block for position {position}"
        assert table[index] > 0, f"{request.data.key}: position {position} is in the null block"
        return table[index], position % self._block_size

    def _add_prompt_logprobs(self, output: ModelRunnerOutput, key: RequestKey, num_tokens: int) -> None:
        request = self.requests[key]
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        found = fake_prompt(request.data.logprobs, request.data.prompt_token_ids, start, end)
        if found is not None:
            output.prompt_logprobs[key] = found

    def _add_logprobs(self, output: ModelRunnerOutput, key: RequestKey, sampled: list[int]) -> None:
        request = self.requests[key]
        rows = fake_sampled(request.data.logprobs, sampled[0], len(request.token_ids) - 1) if sampled else None
        if rows is not None:
            output.logprobs[key] = rows

    def _pool(self, output: ModelRunnerOutput, key: RequestKey, num_tokens: int) -> None:
        """The vector says which positions are in it."""
        request = self.requests[key]
        pooling, start = request.data.pooling, request.num_computed_tokens
        if pooling is None:
            return
        request.positions = [*(request.positions if start else []), *range(start, start + num_tokens)]
        if start + num_tokens == len(request.token_ids):
            assert not pooling.needs_all_tokens or request.positions[0] == 0, f"{key}: its first tokens were not pooled"
            output.pooled[key] = bytes(request.positions if pooling.needs_all_tokens else request.positions[-1:])

    def _sample(self, key: RequestKey, num_tokens: int) -> list[int]:
        request = self.requests[key]
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens < len(request.token_ids) or request.data.pooling is not None:
            return []
        token_id = self._next_token(request.data, request.token_ids)
        request.append(token_id)
        return [token_id]
