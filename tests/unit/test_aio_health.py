"""Watch streams of the health service by themselves."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from stepwire.aio_health import AioHealth


class Context:
    """Of a client whose connection breaks when `is_broken` is set."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.has_written = asyncio.Event()
        self.responses: list[health_pb2.HealthCheckResponse] = []

    async def write(self, response: health_pb2.HealthCheckResponse) -> None:
        self.responses.append(response)
        self.has_written.set()
        if self.is_broken:
            raise grpc.aio.InternalError("the connection is gone")


async def test_a_failure_inside_a_watch_is_its_end_and_not_swallowed() -> None:
    health = AioHealth(["a"])
    with pytest.raises(grpc.aio.InternalError):
        await health.Watch(health_pb2.HealthCheckRequest(service="a"), Context(is_broken=True))


async def test_end_of_watches_ends_well() -> None:
    health, context = AioHealth(["a"]), Context()
    watching = asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(service="a"), context))
    await context.has_written.wait()
    health.end_watches()
    await watching
    assert [response.status for response in context.responses] == [health_pb2.HealthCheckResponse.NOT_SERVING]
