"""How much faster answers come when the next step is planned while one runs: the real model, both modes in turn.

Each round measures one mode and then the other, so that both meet the same machine; reported is the ratio of medians.
"""

from __future__ import annotations

import statistics
import time

from rich.console import Console
from rich.table import Table

from offline import LLM, SamplingParams

BATCH_SIZES = (1, 8, 32)
NUM_ROUNDS = 5
NUM_OUTPUT_TOKENS = 32
PROMPT_TOKENS = 64


def measure(llm: LLM, batch_size: int) -> float:
    """Seconds until all answers of a batch are there."""
    prompts = [[1000 + index, *range(100, 99 + PROMPT_TOKENS)] for index in range(batch_size)]
    sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - started


def main() -> None:
    """Print one line for each batch size."""
    modes = [LLM("embedded", async_scheduling=is_async, enable_prefix_caching=False) for is_async in (False, True)]
    table = Table("requests", "synchronous s", "asynchronous s", "speed-up", title="Asynchronous scheduling")
    for batch_size in BATCH_SIZES:
        for llm in modes:
            measure(llm, batch_size)
        rounds = [[measure(llm, batch_size) for llm in modes] for _ in range(NUM_ROUNDS)]
        sync_s, async_s = (statistics.median(times) for times in zip(*rounds, strict=True))
        table.add_row(str(batch_size), f"{sync_s:.2f}", f"{async_s:.2f}", f"{sync_s / async_s:.2f}")
    Console().print(table)
    for llm in modes:
        llm.close()


if __name__ == "__main__":
    main()
