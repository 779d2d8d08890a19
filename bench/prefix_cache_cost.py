"""What prefix caching costs where nothing is ever found: hashing, looking up and registering, over the steps' time.

For a prompt that is all its blocks, once; while decoding one block in sixteen tokens of each request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench import rows
from bench.loaded_model import BLOCK_SIZE, SESSION, LoadedModel
from bench.rows import Row
from engine_core.kv_cache.block_hash import BlockHasher
from engine_core.kv_cache.kv_cache_layout import KVCacheGroup, KVCacheLayout
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.scheduler.request import Request, SamplingParams, StopConditions
from engine_core.scheduler.request_blocks import RequestBlocks
from engine_core.scheduler.scheduler_config import SchedulerConfig

TARGET = 0.01
NAME = "prefix-cache hashing and lookup at 0 % hits, share of the step"
PROMPT_LEN = 1024
SHORT_PROMPT_LEN = 64
BATCH_SIZE = 32
NUM_BLOCKS = 4096
# The least of so many: other work on the machine only adds.
NUM_REPEATS = 5


def measure() -> Iterator[Row]:
    model = LoadedModel()
    prefill_s = min(model.begin([_tokens(seed, PROMPT_LEN)], 1) for seed in range(NUM_REPEATS))
    yield Row(NAME, f"prompt of {PROMPT_LEN}", min(_prompt_cost() for _ in range(NUM_REPEATS)) / prefill_s, TARGET)
    num_steps = 2 * BLOCK_SIZE
    model.begin([_tokens(seed, SHORT_PROMPT_LEN) for seed in range(BATCH_SIZE)], num_steps + 1)
    decode_s = min(model.decode() for _ in range(num_steps))
    yield Row(NAME, f"decode, B={BATCH_SIZE}", min(_decode_cost() for _ in range(NUM_REPEATS)) / decode_s, TARGET)
    model.close()


def _prompt_cost() -> float:
    """Seconds for one prompt, from its arrival to the end of its step."""
    manager, blocks = _make_blocks()
    request = _request(0, PROMPT_LEN)
    started = time.perf_counter()
    blocks.extend_hashes(request)
    blocks.computed(request)
    seconds = time.perf_counter() - started
    manager.allocate_slots(request.key, PROMPT_LEN)
    request.num_computed_tokens = PROMPT_LEN
    started = time.perf_counter()
    blocks.register(request)
    return seconds + time.perf_counter() - started


def _decode_cost() -> float:
    """Seconds of a step of the whole batch, on average over the steps that fill one block of each request."""
    manager, blocks = _make_blocks()
    requests = [_request(index, SHORT_PROMPT_LEN) for index in range(BATCH_SIZE)]
    for request in requests:
        blocks.extend_hashes(request)
        manager.allocate_slots(request.key, SHORT_PROMPT_LEN + BLOCK_SIZE)
        request.num_computed_tokens = SHORT_PROMPT_LEN
        blocks.register(request)
    started = time.perf_counter()
    for token_id in range(BLOCK_SIZE):
        for request in requests:
            request.output_token_ids.append(token_id)
            request.num_computed_tokens += 1
            blocks.extend_hashes(request)
            blocks.register(request)
    return (time.perf_counter() - started) / BLOCK_SIZE


def _make_blocks() -> tuple[KVCacheManager, RequestBlocks]:
    manager = KVCacheManager(NUM_BLOCKS, KVCacheLayout(BLOCK_SIZE, (KVCacheGroup(),), PROMPT_LEN))
    config = SchedulerConfig(128, 2048, 8192, max_queued_requests=128, max_queued_tokens=1 << 20)
    return manager, RequestBlocks(manager, BlockHasher(BLOCK_SIZE, "bench"), config)


def _request(index: int, num_tokens: int) -> Request:
    stop = StopConditions(max_tokens=BLOCK_SIZE)
    tokens = _tokens(index, num_tokens)
    return Request((SESSION, index), str(index), tokens, SamplingParams(temperature=0.0), stop, arrival_time=0.0)


def _tokens(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + index * 31) % 40_000 + 100 for index in range(count)]


if __name__ == "__main__":
    rows.main(measure)
