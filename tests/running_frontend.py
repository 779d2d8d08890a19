"""A whole frontend inside the test's event loop, on real sockets, with stubs to call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from fakes.fake_engine import WAIT_S
from frontend.config import FrontendSettings
from frontend.process import FrontendProcess
from frontend.server import SERVICE_NAMES
from stepwire.v1 import (
    chat_service_pb2_grpc,
    embedding_service_pb2_grpc,
    generation_service_pb2_grpc,
    model_service_pb2_grpc,
    tokenization_service_pb2_grpc,
)
from stepwire.v1.generation_service_pb2 import GenerateRequest, GenerateStreamResponse

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GENERATION = SERVICE_NAMES[0]
# No connection shared with other tests, and little room on the way for what a client does not read.
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]


@dataclass
class RunningFrontend:
    """The process, and its public services as a client sees them."""

    process: FrontendProcess
    channel: grpc.aio.Channel
    run: asyncio.Task[None]

    def __post_init__(self) -> None:
        self.generation = generation_service_pb2_grpc.GenerationServiceStub(self.channel)
        self.chat = chat_service_pb2_grpc.ChatServiceStub(self.channel)
        self.embedding = embedding_service_pb2_grpc.EmbeddingServiceStub(self.channel)
        self.tokenization = tokenization_service_pb2_grpc.TokenizationServiceStub(self.channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def stream(self, message: GenerateRequest, **options: object) -> Stream:
        return Stream(self.generation.GenerateStream(message, **options))

    async def wait_for_health(self, status: int) -> None:
        async with asyncio.timeout(WAIT_S):
            watch = self.health.Watch(health_pb2.HealthCheckRequest(service=GENERATION))
            async for response in watch:
                if response.status == status:
                    watch.cancel()
                    return

    def metric(self, name: str, **labels: str) -> float:
        value = self.process.metrics.registry.get_sample_value(f"stepwire_frontend_{name}", labels)
        assert value is not None, f"no series {name} {labels}"
        return value

    async def wait_for_metric(self, number: float, name: str, **labels: str) -> None:
        """Return when it has this value: a call is counted when its handler returns, and the client may know before.

        Raises AssertionError with the last value after WAIT_S seconds.
        """
        read = self.process.metrics.registry.get_sample_value
        try:
            async with asyncio.timeout(WAIT_S):
                while read(f"stepwire_frontend_{name}", labels) != number:  # noqa: ASYNC110  # a counter tells nobody
                    await asyncio.sleep(0)
        except TimeoutError:
            found = read(f"stepwire_frontend_{name}", labels)
            raise AssertionError(f"{name} {labels} is still {found} and not {number}") from None

    async def wait_for_tokens(self, number: int, request_id: str = "") -> None:
        """Return when the stream of a request, this one or any, has written so many."""

        def has_written() -> bool:
            flights = self.process.frontend._in_flight.items()
            return any(flight.tokens_emitted == number and request_id in ("", name) for (_, name), flight in flights)

        async with asyncio.timeout(WAIT_S):
            while not has_written():  # noqa: ASYNC110  # a counter tells nobody
                await asyncio.sleep(0)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds; looked at whenever engines come, go or change."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self.process._changed.wait()
                await asyncio.sleep(0)

    async def wait_idle(self) -> None:
        """Return when no request is in flight; engines may still owe the answer to an abort."""
        async with asyncio.timeout(WAIT_S):
            await self.process.frontend.wait_idle()

    @property
    def maps(self) -> tuple[int, int]:
        """Sizes of the maps of requests and of choices."""
        processor = self.process.frontend.model.output_processor
        return processor.num_requests, processor.num_choices


class Stream:
    """A GenerateStream call, read message by message or to its end."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self.call = call
        self._messages = aiter(call)

    async def next(self) -> GenerateStreamResponse:
        return await anext(self._messages)

    async def rest(self) -> list[GenerateStreamResponse]:
        return [message async for message in self._messages]

    async def failure(self) -> Failure:
        """The error the stream ends with, whatever comes before."""
        return await failure_of(self.rest())


@asynccontextmanager
async def running_frontend(*endpoints: str, cache_dir: Path, **settings: object) -> AsyncIterator[RunningFrontend]:
    """A frontend on free ports; at the end it is drained without patience, and must end cleanly."""
    process = FrontendProcess(
        FrontendSettings(
            port=0,
            metrics_port=0,
            admin_port=0,
            engine_endpoints=",".join(endpoints),
            cache_dir=cache_dir,
            **{"http_port": 0, "drain_timeout_s": 0.0, **settings},
        )
    )
    await process.start()
    run = asyncio.create_task(process.run())
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{process.port}", options=CHANNEL_OPTIONS)
    try:
        yield RunningFrontend(process, channel, run)
    finally:
        await channel.close()
        if not run.done():
            process.request_stop(at_once=True)
        await run


@dataclass(frozen=True)
class Failure:
    """An error status, unpacked."""

    code: grpc.StatusCode
    message: str
    info: error_details_pb2.ErrorInfo
    bad_request: error_details_pb2.BadRequest
    retry_info: error_details_pb2.RetryInfo

    @property
    def reason(self) -> str:
        return self.info.reason

    @property
    def fields(self) -> list[str]:
        return [violation.field for violation in self.bad_request.field_violations]


async def failure_of(call: Awaitable[object]) -> Failure:
    """The error a call ends with; the test fails when it ends well."""
    try:
        result = await call
    except grpc.aio.AioRpcError as error:
        return unpack(error)
    raise AssertionError(f"the call answered {result}")


def unpack(error: grpc.aio.AioRpcError) -> Failure:
    details = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        for detail in details:
            packed.Unpack(detail)
    return Failure(error.code(), error.details() or "", *details)


def request(text: str = "hello world", *, max_tokens: int = 4, **fields: object) -> GenerateRequest:
    """A greedy text request."""
    message = GenerateRequest(text=text, **fields)
    message.stop.max_tokens = max_tokens
    if not message.sampling.HasField("temperature"):
        message.sampling.temperature = 0
    return message
