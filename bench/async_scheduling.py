"""How much faster answers come when the next step is planned while one runs: the real model, both modes in turn.

Each round measures one mode and then the other, so that both meet the same machine; reported is the median of the
rounds' ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from bench import engine_flags, rows
from bench.rows import Row
from offline import LLM, SamplingParams

BATCH_SIZES = (1, 8, 32)
NUM_ROUNDS = 3
NUM_OUTPUT_TOKENS = 32
PROMPT_TOKENS = 64


def measure() -> Iterator[Row]:
    modes = [
        LLM(**{**engine_flags.SETTINGS, "async_scheduling": is_async, "enable_prefix_caching": False})  # type: ignore[arg-type]  # settings by name
        for is_async in (False, True)
    ]
    for batch_size in BATCH_SIZES:
        for llm in modes:
            _seconds(llm, batch_size)
        rounds = [[_seconds(llm, batch_size) for llm in modes] for _ in range(NUM_ROUNDS)]
        speed_up = statistics.median(sync_s / async_s for sync_s, async_s in rounds)
        yield Row("asynchronous over synchronous scheduling, tok/s", f"c={batch_size}", speed_up, better="higher")
    for llm in modes:
        llm.close()


def _seconds(llm: LLM, batch_size: int) -> float:
    """Until all answers of a batch are there."""
    prompts = [[1000 + index, *range(100, 99 + PROMPT_TOKENS)] for index in range(batch_size)]
    sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - started


if __name__ == "__main__":
    rows.main(measure)
