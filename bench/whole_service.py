"""Tokens a second through the whole service (gRPC client, frontend, engine) over those of `offline` in one process.

Both have the model loaded and answer the same prompts in turn, W1: 64 tokens in, 128 out, greedy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import islice

from bench import engine_flags, rows, running_service
from bench.rows import Row
from bench.running_service import RunningService
from offline import LLM, SamplingParams
from stepwire_client.load.summary import summarize
from stepwire_client.load.workload import Lengths, LoadRequest, synthetic

TARGET = 0.95
CONCURRENCIES = (1, 8, 32, 64)
NUM_ROUNDS = 3
INPUT, OUTPUT = Lengths(64, 64), Lengths(128, 128)
VOCAB_SIZE = 49_000


def measure() -> Iterator[Row]:
    with running_service.running(*engine_flags.flags()) as service, LLM(**engine_flags.SETTINGS) as llm:  # type: ignore[arg-type]  # settings by name
        yield from compare(service, llm, CONCURRENCIES, TARGET)


def compare(
    service: RunningService, llm: LLM, concurrencies: tuple[int, ...], target: float | None, prefix: str = ""
) -> Iterator[Row]:
    """The ratio for each concurrency, and what both made."""
    # All different, so that no prefix cache hits.
    requests = synthetic(INPUT, OUTPUT, 0, VOCAB_SIZE, "whole service")
    warm_up = list(islice(requests, 2))
    service.answer(warm_up, 2)
    offline_tok_s(llm, warm_up)
    for concurrency in concurrencies:
        rounds = []
        for _ in range(NUM_ROUNDS):
            batch = list(islice(requests, concurrency))
            offline = offline_tok_s(llm, batch)
            rounds.append((summarize(service.answer(batch, concurrency)), offline))
        case = f"c={concurrency}"
        of_service = [float(str(row["tok_s"])) for row, _ in rounds]
        ratios = [mine / offline for mine, (_, offline) in zip(of_service, rounds, strict=True)]
        yield Row(prefix + "whole service over offline, tok/s", case, statistics.median(ratios), target, "higher")
        yield Row(prefix + "whole service, tok/s", case, statistics.median(of_service), better="higher")
        yield Row(prefix + "offline, tok/s", case, statistics.median(offline for _, offline in rounds), better="higher")
        for name in ("ttft_mean", "itl_mean"):
            yield Row(
                f"{prefix}whole service, {name} ms", case, statistics.median(float(str(row[name])) for row, _ in rounds)
            )


def offline_tok_s(llm: LLM, batch: list[LoadRequest]) -> float:
    params = SamplingParams(max_tokens=OUTPUT.high, temperature=0.0, ignore_eos=True)
    prompts = [list(request.prompt_token_ids) for request in batch]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


if __name__ == "__main__":
    rows.main(measure)
