"""How long a running answer waits for its next token while long prompts arrive: ITL p99 with them over p50 without.

Eight answers stream all the time; prompts of 1 024 tokens come one after the other beside them. Default settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice

from bench import engine_flags, rows, running_service
from bench.rows import Row
from bench.running_service import RunningService, checked
from stepwire_client.load.grpc_target import GrpcTarget
from stepwire_client.load.loops import closed_loop
from stepwire_client.load.summary import Row as Figures
from stepwire_client.load.summary import summarize
from stepwire_client.load.workload import Lengths, LoadRequest, synthetic

TARGET = 2.5
NUM_STREAMS = 8
STREAM_LEN = Lengths(128, 128)
LONG_PROMPT = Lengths(1024, 1024)
VOCAB_SIZE = 49_000


def measure() -> Iterator[Row]:
    streams = synthetic(Lengths(64, 64), STREAM_LEN, 0, VOCAB_SIZE, "streams")
    with running_service.running(*engine_flags.flags()) as service:
        service.answer(list(islice(streams, 2)), 2)
        without = summarize(service.answer(list(islice(streams, NUM_STREAMS)), NUM_STREAMS))
        beside = asyncio.run(_beside_long_prompts(service, list(islice(streams, NUM_STREAMS))))
    p50, p99 = float(str(without["itl_p50"])), float(str(beside["itl_p99"]))
    case = f"{NUM_STREAMS} streams"
    yield Row("ITL p99 while 1 024-token prompts arrive over ITL p50 without", case, p99 / p50, TARGET)
    yield Row("ITL p50 without long prompts, ms", case, p50)
    yield Row("ITL p99 without long prompts, ms", case, float(str(without["itl_p99"])))
    yield Row("ITL p99 with long prompts, ms", case, p99)


async def _beside_long_prompts(service: RunningService, streams: list[LoadRequest]) -> Figures:
    target = GrpcTarget(service.target, model="", ignore_eos=True, timeout_s=300.0)
    long_prompts = synthetic(LONG_PROMPT, Lengths(1, 1), 0, VOCAB_SIZE, "long prompts")
    load = asyncio.create_task(closed_loop(target, streams, NUM_STREAMS))
    try:
        while not load.done():
            checked(await closed_loop(target, list(islice(long_prompts, 1)), 1))
        return summarize(checked(await load))
    finally:
        await target.close()


if __name__ == "__main__":
    rows.main(measure)
