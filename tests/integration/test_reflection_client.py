"""A client nobody here wrote, and that has no protos, lists and calls the public API by reflection.

grpcurl where it is installed, else `buf curl`; and the very grpcurl line that `make run` prints.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import frontend_process
from fakes import small_tokenizer
from fakes.fake_engine import FakeEngine
from launcher import sample
from skips import require_program

pytestmark = pytest.mark.slow


@pytest_asyncio.fixture
async def target(tmp_path: Path) -> AsyncIterator[str]:
    engine = await FakeEngine(small_tokenizer.write_model_dir(tmp_path, small_tokenizer.byte_level_backend())).start()
    try:
        async with frontend_process.serving(sys.executable, engine.endpoint, tmp_path) as address:
            yield address
    finally:
        await engine.stop()


class OutsideClient:
    """One command line for both programs."""

    def __init__(self) -> None:
        self._program = require_program("grpcurl", "buf", how="`npm ci` installs buf")

    async def list_services(self, target: str) -> list[str]:
        if self._is_grpcurl:
            return (await self._run("-plaintext", target, "list")).split()
        return (await self._buf("--list-services", f"http://{target}")).split()

    async def call(self, target: str, method: str, body: str) -> list[dict]:
        if self._is_grpcurl:
            output = await self._run("-plaintext", "-d", body, target, method)
        else:
            output = await self._buf("-d", body, f"http://{target}/{method}")
        return _json_objects(output)

    @property
    def _is_grpcurl(self) -> bool:
        return Path(self._program).name.startswith("grpcurl")

    async def _buf(self, *arguments: str) -> str:
        return await self._run("curl", "--http2-prior-knowledge", "--protocol", "grpc", "--reflect", *arguments)

    async def _run(self, *arguments: str) -> str:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(self._program, *arguments, stdout=pipe, stderr=pipe)
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return output.decode()


def _json_objects(text: str) -> list[dict]:
    decoder, objects, position = json.JSONDecoder(), [], 0
    while position < len(text.rstrip()):
        value, position = decoder.raw_decode(text, position)
        objects.append(value)
        position += len(text[position:]) - len(text[position:].lstrip())
    return objects


async def test_lists_the_public_services(target):
    services = await OutsideClient().list_services(target)
    expected = {"GenerationService", "ChatService", "EmbeddingService", "TokenizationService", "ModelService"}
    assert {f"stepwire.v1.{name}" for name in expected} <= set(services)
    assert "grpc.health.v1.Health" in services


async def test_calls_generate_stream_with_the_printed_line(target):
    words = shlex.split(sample.grpcurl_line(target))
    events = await OutsideClient().call(target, words[-1], words[words.index("-d") + 1])
    assert "accepted" in events[0]
    assert "finished" in events[-1]
    assert [event.get("index", "0") for event in events] == [str(number) for number in range(len(events))]


async def test_calls_the_other_services(target):
    client = OutsideClient()
    (models,) = await client.call(target, "stepwire.v1.ModelService/ListModels", "{}")
    assert [model["id"] for model in models["models"]] == ["fake-model"]
    (answer,) = await client.call(target, "stepwire.v1.TokenizationService/Tokenize", '{"texts": ["hello"]}')
    assert answer["encodings"][0]["tokenIds"]
