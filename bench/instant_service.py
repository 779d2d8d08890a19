"""The whole service around an executor that answers at once: what serving alone can do, and what a token costs where.

Client, frontend and engine share the machine. The best of the rounds counts: other work on the machine only adds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice

import psutil

from bench import engine_flags, rows, running_service
from bench.rows import Row
from bench.running_service import RunningService
from stepwire_client.load.workload import Lengths, synthetic

CONCURRENCY = 256
NUM_OUTPUT_TOKENS = 256
NUM_ROUNDS = 3
MAX_MODEL_LEN = 8192
VOCAB_SIZE = 49_000
TOK_S_TARGET = 20_000.0
FRONTEND_TARGET_US = 25.0


def running() -> AbstractContextManager[RunningService]:
    """The services around the instant executor."""
    flags = engine_flags.flags(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=CONCURRENCY,
        # Each prompt must fit one step: the executor samples for all that it is given.
        max_num_batched_tokens=CONCURRENCY * 64,
        # On a crowded machine its threads may get their turn late: that is to be a low figure, and no failure.
        ping_timeout_ms=120_000,
    )
    return running_service.running(*flags, engine_module="bench.instant_engine")


def measure() -> Iterator[Row]:
    case = f"c={CONCURRENCY}"
    with running() as service:
        rounds = [_costs(service, seed) for seed in range(NUM_ROUNDS)]
    tok_s = max(figures["tok_s"] for figures in rounds)
    yield Row("end to end with an instant executor, tok/s", case, tok_s, TOK_S_TARGET, "higher")
    for part, target in (("frontend", FRONTEND_TARGET_US), ("engine", None), ("client", None)):
        yield Row(f"{part} CPU, µs a token", case, min(figures[part] for figures in rounds), target)


def _costs(service: RunningService, seed: int) -> dict[str, float]:
    requests = synthetic(Lengths(64, 64), Lengths(NUM_OUTPUT_TOKENS, NUM_OUTPUT_TOKENS), 0, VOCAB_SIZE, f"costs {seed}")
    batch = list(islice(requests, CONCURRENCY))
    processes = {"frontend": service.frontend, "engine": service.engine, "client": psutil.Process()}
    before = {part: _cpu_s(process) for part, process in processes.items()}
    started = time.perf_counter()
    result = service.answer(batch, CONCURRENCY)
    seconds = time.perf_counter() - started
    num_tokens = sum(reply.num_tokens for reply in result.replies)
    costs = {part: (_cpu_s(process) - before[part]) / num_tokens * 1e6 for part, process in processes.items()}
    return {"tok_s": num_tokens / seconds, **costs}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    rows.main(measure)
