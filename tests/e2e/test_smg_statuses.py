"""What the smg gateway makes of our statuses: the HTTP code of each, from a fake engine that refuses as it is told."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from fakes.fake_engine import FakeEngine
from fakes.small_tokenizer import byte_level_backend, write_model_dir
from running_frontend import SERVING, running_frontend
from smg_gateway import gateway_program, running_gateway
from stepwire.v1 import common_pb2

pytestmark = pytest.mark.slow

HTTP_OF_REASON = {
    "GRAMMAR_INVALID": (3, 400),
    "KV_CAPACITY": (9, 400),
    "QUEUE_FULL": (8, 429),
    "REQUEST_FAILED": (13, 500),
    "UNSUPPORTED_FEATURE": (12, 501),
    "DRAINING": (14, 503),
    "QUEUE_TIMEOUT": (4, 504),
    "MODEL_NOT_FOUND": (5, 404),
    "DUPLICATE_REQUEST": (6, 409),
    "PERMISSION_DENIED": (7, 403),
    "UNAUTHENTICATED": (16, 401),
    "SESSION_REPLACED": (10, 409),
    "CANCELLED": (1, 502),
}


async def test_each_status_has_its_http_code(tmp_path: Path) -> None:
    gateway_program()
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    write_model_dir(model_dir, byte_level_backend(), config={"eos_token_id": 0})
    with ExitStack() as exit_stack:
        async with (
            FakeEngine(model_dir, vocab_size=400).running() as engine,
            running_frontend(engine.endpoint, cache_dir=tmp_path / "cache") as frontend,
        ):
            await frontend.wait_for_health(SERVING)
            gateway = running_gateway(frontend.process.port, model_dir, tmp_path / "smg.log")
            url = await asyncio.to_thread(exit_stack.enter_context, gateway)
            async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=20) as client:
                found = {reason: await status_of(client, engine, reason) for reason in HTTP_OF_REASON}
            await asyncio.to_thread(exit_stack.close)
    assert found == {reason: status for reason, (_, status) in HTTP_OF_REASON.items()}


async def status_of(client: openai.AsyncOpenAI, engine: FakeEngine, reason: str) -> int:
    code, _ = HTTP_OF_REASON[reason]
    error = common_pb2.EngineError(reason=reason, message="as the test says", grpc_code=code)
    engine.reject = lambda request: error
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(model="fake-model", prompt="hello", max_tokens=4)
    return caught.value.status_code
