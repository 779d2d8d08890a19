"""A closed loop of streams against a frontend, in a process of its own; prints what it saw as one JSON line.

`python bench/stream_client.py TARGET CONCURRENCY REQUESTS TOKENS [PID ...]`. The CPU time of the processes named is
taken at the start and at the end of the measured part, so that only that counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from itertools import count
from pathlib import Path

import grpc.aio

from stepwire.v1 import generation_service_pb2 as pb
from stepwire.v1 import generation_service_pb2_grpc as pb_grpc

NUM_PROMPT_TOKENS = 8
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


async def measure(
    target: str, concurrency: int, num_requests: int, num_tokens: int, pids: list[int]
) -> dict[str, object]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        await _closed_loop(stub, concurrency, concurrency, 8)
        cpu = {pid: _cpu_s(pid) for pid in (os.getpid(), *pids)}
        start = time.perf_counter()
        messages = await _closed_loop(stub, concurrency, num_requests, num_tokens)
        wall_s = time.perf_counter() - start
        return {
            "tokens": num_requests * num_tokens,
            "messages": messages,
            "wall_s": wall_s,
            "cpu_s": [_cpu_s(pid) - before for pid, before in cpu.items()],
        }


async def _closed_loop(
    stub: pb_grpc.GenerationServiceStub, concurrency: int, num_requests: int, num_tokens: int
) -> int:
    numbers = count()

    async def run() -> int:
        num_messages = 0
        while (number := next(numbers)) < num_requests:
            num_messages += await _generate(stub, number, num_tokens)
        return num_messages

    return sum(await asyncio.gather(*(run() for _ in range(concurrency))))


async def _generate(stub: pb_grpc.GenerationServiceStub, number: int, num_tokens: int) -> int:
    request = pb.GenerateRequest()
    request.token_ids.ids.extend(300 + (number * 131 + place) % 20_000 for place in range(NUM_PROMPT_TOKENS))
    request.stop.max_tokens = num_tokens
    request.stop.ignore_eos = True
    request.sampling.temperature = 0.0
    num_messages = 0
    finished: pb.GenerateStreamResponse.Finished | None = None
    call = stub.GenerateStream(request)
    while (message := await call.read()) is not grpc.aio.EOF:
        num_messages += 1
        if message.HasField("finished"):
            finished = message.finished
    if finished is None or finished.usage.completion_tokens != num_tokens:
        raise RuntimeError(f"request {number} ended early")
    return num_messages


def _cpu_s(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


if __name__ == "__main__":
    target, *numbers = sys.argv[1:]
    concurrency, num_requests, num_tokens, *pids = map(int, numbers)
    sys.stdout.write(json.dumps(asyncio.run(measure(target, concurrency, num_requests, num_tokens, pids))) + "\n")
