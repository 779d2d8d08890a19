"""What a tenant that floods does to another: the time to the first token of a quiet one, alone and beside it.

Both services are real processes, and so is the flood; the engine has no model and steps at a fixed pace. The quiet
tenant keeps a few streams busy; the other keeps several times more requests waiting than the engine has places. PASS or
FAIL goes to standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc.aio

from bench import rows, running_service, service_overhead
from bench.engine_flags import ROOT
from bench.rows import Row
from stepwire.v1 import common_pb2, generation_service_pb2, generation_service_pb2_grpc

TARGET = 2.0
# So slow that two cores have time for engine, frontend, flood and this process: the line is measured, not the machine.
STEP_MS = 150
NUM_PLACES = 64
ENGINE_FLAGS = ("--max-num-seqs", str(NUM_PLACES), "--max-num-batched-tokens", "8192", "--num-blocks", "65536")
QUIET_STREAMS, QUIET_REQUESTS = 4, 100
FLOOD_STREAMS = 400
PROMPT_LEN = 32
QUIET_ANSWER_LENS, FLOOD_ANSWER_LENS = (4, 12), (16, 64)
CLASS_KEY = "x-gateway-inference-fairness-id"

Stub = generation_service_pb2_grpc.GenerationServiceStub


def measure(num_quiet: int = QUIET_REQUESTS, num_flood: int = FLOOD_STREAMS) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        flags = (*ENGINE_FLAGS, "--step-ms", str(STEP_MS), "--report", str(Path(directory) / "report"))
        flags += ("--", "--tokenizer", str(service_overhead.MODEL))
        with running_service.running(*flags, engine_module="bench.instant_engine") as service:
            alone = asyncio.run(_measure_quiet(service.target, num_quiet))
            with _flooded(service.target, num_flood):
                beside = asyncio.run(_measure_quiet(service.target, num_quiet))
    ratio = p95(beside) / p95(alone)
    sys.stderr.write(f"{'PASS' if ratio <= TARGET else 'FAIL'}: p95 beside a flood is {ratio:.2f} of that alone\n")
    case = f"{QUIET_STREAMS} streams beside {num_flood}"
    yield Row("TTFT p95 of a quiet tenant, ms", "alone", p95(alone) * 1e3)
    yield Row("TTFT p95 of a quiet tenant, ms", case, p95(beside) * 1e3)
    yield Row("the same, over that alone", case, ratio, TARGET)


def p95(times_s: list[float]) -> float:
    return statistics.quantiles(times_s, n=20)[-1]


async def _measure_quiet(target: str, count: int) -> list[float]:
    async with grpc.aio.insecure_channel(target) as channel:
        await _quiet(Stub(channel), QUIET_STREAMS * 2)
        return await _quiet(Stub(channel), count)


async def _quiet(stub: Stub, count: int) -> list[float]:
    """Times to the first token, in seconds."""
    lengths = random.Random(1)
    todo = iter([_request(lengths, QUIET_ANSWER_LENS) for _ in range(count)])

    async def stream() -> list[float]:
        return [await _answer(stub, message, "quiet") for message in todo]

    return [time_s for times_s in await asyncio.gather(*(stream() for _ in range(QUIET_STREAMS))) for time_s in times_s]


@contextlib.contextmanager
def _flooded(target: str, count: int) -> Iterator[None]:
    """By a process of its own, so that its work does not count as time of the quiet one."""
    command = [sys.executable, "-m", "bench.two_tenants", "--flood", target, "--streams", str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise RuntimeError("the flood has ended before it began")
            yield
        finally:
            process.kill()


async def _flood(target: str, count: int) -> None:
    """As many streams as that, each with a new request as soon as one has ended; says when it is in full flow."""
    lengths = random.Random(2)
    begun = asyncio.Semaphore(0)

    async def stream(stub: Stub) -> None:
        while True:
            await _answer(stub, _request(lengths, FLOOD_ANSWER_LENS), "loud")
            begun.release()

    async with grpc.aio.insecure_channel(target) as channel, asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(stream(Stub(channel)))
        for _ in range(NUM_PLACES):
            await begun.acquire()
        sys.stdout.write("flowing\n")
        sys.stdout.flush()


def _request(lengths: random.Random, answer_lens: tuple[int, int]) -> generation_service_pb2.GenerateRequest:
    first = lengths.randrange(300, 20_000)
    return generation_service_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=range(first, first + PROMPT_LEN)),
        stop=common_pb2.StopConditions(max_tokens=lengths.randint(*answer_lens), ignore_eos=True),
    )


async def _answer(stub: Stub, message: generation_service_pb2.GenerateRequest, client_class: str) -> float:
    """Read to the end; the time to the first token, in seconds."""
    start, first = time.perf_counter(), None
    async for response in stub.GenerateStream(message, metadata=((CLASS_KEY, client_class),)):
        if first is None and response.HasField("delta"):
            first = time.perf_counter()
    if first is None:
        raise RuntimeError("an answer without a token")
    return first - start


def main() -> None:
    parser = rows.parser()
    parser.add_argument("--flood", metavar="TARGET", help="be the tenant that floods this server, until killed")
    parser.add_argument("--streams", type=int, default=FLOOD_STREAMS, help="how many requests it keeps open")
    arguments = parser.parse_args()
    if arguments.flood:
        asyncio.run(_flood(arguments.flood, arguments.streams))
    else:
        rows.report(measure(num_flood=arguments.streams), is_json=arguments.json)


if __name__ == "__main__":
    main()
