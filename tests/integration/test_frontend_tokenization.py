"""The tokenization service through a real socket: limits by name, admission, drain, and work off the event loop."""

from __future__ import annotations

import threading

import grpc
import pytest

from fakes.fake_engine import FakeEngine
from frontend.api.tokenization import MAX_CHARS, MAX_CHARS_WITH_OFFSETS, MAX_ITEMS, MAX_TOKEN_IDS
from running_frontend import SERVING, RunningFrontend, failure_of, request, running_frontend
from stepwire.v1 import common_pb2
from stepwire.v1.tokenization_service_pb2 import DetokenizeRequest, TokenizeRequest

TOO_LARGE = {
    "characters": TokenizeRequest(texts=["x" * MAX_CHARS, "x"]),
    "characters with offsets": TokenizeRequest(texts=["x" * (MAX_CHARS_WITH_OFFSETS + 1)], return_offsets=True),
    "texts": TokenizeRequest(texts=[""] * (MAX_ITEMS + 1)),
    "token ids": DetokenizeRequest(
        sequences=[common_pb2.TokenIds(ids=[5] * MAX_TOKEN_IDS), common_pb2.TokenIds(ids=[5])]
    ),
    "sequences": DetokenizeRequest(sequences=[common_pb2.TokenIds()] * (MAX_ITEMS + 1)),
}


def call(frontend: RunningFrontend, message: TokenizeRequest | DetokenizeRequest):
    service = frontend.tokenization
    return service.Tokenize(message) if isinstance(message, TokenizeRequest) else service.Detokenize(message)


@pytest.mark.parametrize("what", TOO_LARGE)
async def test_too_large_a_call_is_refused_by_name_and_limit(frontend: RunningFrontend, what: str):
    message = TOO_LARGE[what]
    failure = await failure_of(call(frontend, message))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert failure.fields == ["texts" if isinstance(message, TokenizeRequest) else "sequences"]
    assert f"{what.removesuffix(' with offsets')}, at most " in failure.message


async def test_offsets_come_on_demand_only(frontend: RunningFrontend):
    (plain,) = (await call(frontend, TokenizeRequest(texts=["hello world"]))).encodings
    (full,) = (await call(frontend, TokenizeRequest(texts=["hello world"], return_offsets=True))).encodings
    assert (list(plain.offset_starts), list(plain.offset_ends)) == ([], [])
    assert (list(full.offset_starts), list(full.offset_ends)) == ([0, 5], [5, 11])
    assert plain.token_ids == full.token_ids


@pytest.mark.parametrize("message", [TokenizeRequest(texts=["hello"]), DetokenizeRequest()], ids=["encode", "decode"])
async def test_a_draining_frontend_refuses_like_generate(frontend: RunningFrontend, message):
    frontend.process.frontend.begin_drain()
    failure = await failure_of(call(frontend, message))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert failure.retry_info.retry_delay.ToMilliseconds() > 0


async def test_a_call_takes_a_permit_and_gives_it_back(engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", max_concurrent_requests=1) as running:
        await running.wait_for_health(SERVING)
        engine.may_step.clear()
        stream = running.stream(request())
        await stream.next()
        failure = await failure_of(call(running, TokenizeRequest(texts=["hello"])))
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        engine.may_step.set()
        await stream.rest()
        await running.wait_idle()
        await failure_of(call(running, TOO_LARGE["texts"]))
        for _ in range(2):
            assert (await call(running, TokenizeRequest(texts=["hello"]))).encodings


async def test_work_is_done_in_the_threads_that_encode_prompts(frontend: RunningFrontend, monkeypatch):
    tokenizer, threads = frontend.process.frontend.model.tokenizer, []
    for name in ("encode_batch", "decode_batch"):
        real = getattr(tokenizer, name)

        def noted(*args, real=real, **options):
            threads.append(threading.current_thread().name)
            return real(*args, **options)

        monkeypatch.setattr(tokenizer, name, noted)
    await call(frontend, TokenizeRequest(texts=["hello"]))
    await call(frontend, DetokenizeRequest(sequences=[common_pb2.TokenIds(ids=[5])]))
    assert len(threads) == 2
    assert all(name.startswith("tokenizer") for name in threads)
