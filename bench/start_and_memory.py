"""From starting both processes to serving, and what the engine holds beyond weights and KV cache under load."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

import psutil

from bench import engine_flags, rows, running_service
from bench.loaded_model import LoadedModel
from bench.rows import Row
from stepwire_client.load.workload import Lengths, synthetic

START_TARGET_S = 12.0
MEMORY_TARGET_MB = 700.0
# So small that it need not be subtracted, of which only what requests have touched is resident.
KV_CACHE = "64MiB"
NUM_REQUESTS = 8


def measure() -> Iterator[Row]:
    # Its files are in the page cache from here on, as on a machine that has started before.
    model = LoadedModel()
    weight_bytes = model.weight_bytes
    model.close()
    requests = list(islice(synthetic(Lengths(256, 256), Lengths(32, 32), 0, 49_000, "memory"), NUM_REQUESTS))
    started = time.perf_counter()
    with running_service.running(*engine_flags.flags(kv_cache_memory=KV_CACHE)) as service:
        yield Row("start to ready, s", "both services", time.perf_counter() - started, START_TARGET_S)
        service.answer(requests, NUM_REQUESTS)
        resident = service.engine.memory_info().rss
        overhead_mb = (resident - weight_bytes) / 1e6
        case = f"after {NUM_REQUESTS} requests"
        yield Row("engine resident memory over weights + KV, MB", case, overhead_mb, MEMORY_TARGET_MB)
        yield Row("engine resident memory, MB", case, resident / 1e6)
        yield Row("engine peak resident memory, MB", case, _peak_bytes(service.engine) / 1e6)
        yield Row("frontend resident memory, MB", case, service.frontend.memory_info().rss / 1e6)


def _peak_bytes(process: psutil.Process) -> int:
    with open(f"/proc/{process.pid}/status", encoding="ascii") as lines:
        [peak_kb] = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(peak_kb) * 1024


if __name__ == "__main__":
    rows.main(measure)
