"""What an operator is told when no engine answers at an address."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc.aio
import pytest

from frontend.engine_client.channel import ANOTHER_PROTOCOL, open_channel, why_silent
from frontend.engine_client.connection_state import ClientIdentity
from otlp_receiver import OtlpReceiver, receiving_http


@pytest.fixture
def web_server() -> Iterator[str]:
    with receiving_http(OtlpReceiver()) as url:
        yield url.removeprefix("http://")


async def call(address: str) -> grpc.aio.AioRpcError:
    channel = open_channel(address, ClientIdentity("client", "session", ""))
    try:
        await channel.unary_unary("/any/Method")(b"", timeout=30)
    except grpc.aio.AioRpcError as error:
        return error
    finally:
        await channel.close()
    pytest.fail("somebody has answered")


async def test_a_web_server_in_place_of_an_engine_is_called_another_protocol(web_server: str) -> None:
    async with asyncio.timeout(60):
        told = why_silent(await call(web_server))
    assert told.startswith("UNAVAILABLE: ")
    assert told.endswith(ANOTHER_PROTOCOL)


async def test_a_port_where_nobody_listens_is_no_other_protocol() -> None:
    async with asyncio.timeout(60):
        assert ANOTHER_PROTOCOL not in why_silent(await call("127.0.0.1:9"))
