"""What a stream costs the frontend while nothing happens on it, and what a connection does.

Streams: each has delivered some tokens of a long answer, then the engine is paused and all of them stand still.
Connections: each has made one call. Both services are real processes; the engine has no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path

import grpc.aio
import psutil

from bench import rows, running_service, service_overhead
from bench.rows import Row
from bench.running_service import RunningService
from stepwire.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    common_pb2,
    control_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
)

NUM_STREAMS = 2000
NUM_CONNECTIONS = 3000
# Before anything is measured.
NUM_WARM_UP = 100
NUM_STEPPED = 4
ANSWER_LEN = 4000
# So slow that the frontend keeps up with all of them on a busy machine.
STEP_MS = 2000
ENGINE_FLAGS = ("--max-num-seqs", "4096", "--max-num-batched-tokens", "65536", "--num-blocks", "65536")
ENGINE_FLAGS += ("--max-queued-requests", "10000")
FRONTEND_FLAGS = ("--", "--tokenizer", str(service_overhead.MODEL), "--max-concurrent-requests", "10000")
# After the last token, for what is still on its way.
SETTLE_S = 2.0
CPU_WINDOW_S = 5.0
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]

StreamCall = grpc.aio.UnaryStreamCall


def measure(num_streams: int = NUM_STREAMS, num_connections: int = NUM_CONNECTIONS) -> Iterator[Row]:
    with _service() as service:
        yield from asyncio.run(_measure_streams(service, num_streams))
    # Another process: memory that the streams have given back would hide what connections need.
    with _service() as service:
        yield asyncio.run(_measure_connections(service, num_connections))


@contextlib.contextmanager
def _service() -> Iterator[RunningService]:
    with tempfile.TemporaryDirectory() as directory:
        flags = (*ENGINE_FLAGS, "--step-ms", str(STEP_MS), "--report", str(Path(directory) / "report"), *FRONTEND_FLAGS)
        with running_service.running(*flags, engine_module="bench.instant_engine") as service:
            yield service


async def _measure_streams(service: RunningService, count: int) -> list[Row]:
    # What the first ones leave behind for good is not theirs.
    async with _streams(service, NUM_WARM_UP):
        pass
    before = _resident_kib(service.frontend)
    async with _streams(service, count):
        await asyncio.sleep(SETTLE_S)
        case = f"{count} streams, silent"
        grown = _resident_kib(service.frontend) - before
        return [
            Row("frontend memory a silent stream, KiB", case, grown / count),
            Row("frontend CPU of all of them, % of a core", case, await _cpu_percent(service.frontend)),
        ]


async def _measure_connections(service: RunningService, count: int) -> Row:
    # The engine's report needs some steps.
    async with _streams(service, NUM_STEPPED):
        pass
    # These stay open: what they gave back would hide what the others need.
    async with _connections(service.target, NUM_WARM_UP):
        before = _resident_kib(service.frontend)
        async with _connections(service.target, count):
            grown = _resident_kib(service.frontend) - before
    return Row("frontend memory a silent connection, KiB", f"{count} connections, silent", grown / count)


@contextlib.asynccontextmanager
async def _streams(service: RunningService, count: int) -> AsyncIterator[None]:
    """So many, each with some tokens, while the engine is paused."""
    admin_channel, channel = map(grpc.aio.insecure_channel, (service.admin_target, service.target))
    async with admin_channel, channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(admin_channel)
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        messages = [
            generation_service_pb2.GenerateRequest(
                token_ids=common_pb2.TokenIds(ids=request.prompt_token_ids),
                stop=common_pb2.StopConditions(max_tokens=ANSWER_LEN, ignore_eos=True),
            )
            for request in islice(service_overhead.requests(ANSWER_LEN, "idle"), count)
        ]
        calls = [stub.GenerateStream(message) for message in messages]
        await asyncio.gather(*map(_read_tokens, calls))
        args = control_pb2.PauseArgs(mode=control_pb2.PAUSE_MODE_KEEP)
        await admin.Pause(admin_service_pb2.PauseRequest(args=args))
        # What was on its way is read, or it would be the frontend's to keep.
        reading = [asyncio.create_task(_read_all(call)) for call in calls]
        yield
        for call in calls:
            call.cancel()
        await asyncio.gather(*reading)
        await admin.Resume(admin_service_pb2.ResumeRequest())


async def _read_tokens(call: StreamCall[object, object]) -> None:
    """Until it has delivered some."""
    while not (await call.read()).HasField("delta"):  # type: ignore[attr-defined]  # the stubs say object
        pass


async def _read_all(call: StreamCall[object, object]) -> None:
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass


@contextlib.asynccontextmanager
async def _connections(target: str, count: int) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            channel = grpc.aio.insecure_channel(target, options=OWN_CONNECTION)
            await stack.enter_async_context(channel)
            await model_service_pb2_grpc.ModelServiceStub(channel).ListModels(model_service_pb2.ListModelsRequest())
        yield


async def _cpu_percent(process: psutil.Process) -> float:
    process.cpu_percent()
    await asyncio.sleep(CPU_WINDOW_S)
    return float(process.cpu_percent())


def _resident_kib(process: psutil.Process) -> float:
    return float(process.memory_info().rss / 1024)


if __name__ == "__main__":
    rows.main(measure)
