"""Requests that pool, at the engine's port: the facts it tells, the vector with the end, and the promises it checks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine_core.scheduler.pooling import PoolingParams, PoolingType
from fakes.fake_pooling import HIDDEN_SIZE, fake_vector
from running_engine import EngineStream, RunningEngine, engine_request, running_engine
from stepwire.engine.v1 import engine_core_pb2 as pb

PROMPT = list(range(10, 40))
EMBED = {"task": "embed"}
LIMITS = ("--max-model-len", "1000", "--num-blocks", "100", "--max-num-batched-tokens", "16", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with running_engine(*LIMITS, "--pooling", "mean") as engine:
        yield engine


def output_of(stream: EngineStream, handle: int) -> pb.RequestOutput:
    """The one with the end."""
    stream.until_finished(handle)
    [output] = [
        output
        for frame in stream.frames
        for output in frame.outputs.outputs
        if output.handle == handle and output.HasField("finish")
    ]
    return output


def test_ready_says_that_and_how_the_engine_pools(engine: RunningEngine) -> None:
    ready = engine.connect("facts").next().ready
    assert ready.embedding_dimensions == HIDDEN_SIZE
    assert "pooling:mean" in ready.features


def test_the_vector_comes_with_the_end_also_beside_a_generation(engine: RunningEngine) -> None:
    stream = engine.connect("vectors")
    stream.add(engine_request(1, [50] * 5, 40))
    stream.add(engine_request(2, PROMPT, 0, pooling=EMBED))
    stream.add(engine_request(3, PROMPT, 0, pooling={**EMBED, "normalize": False, "dimensions": 2}))
    outputs = [output_of(stream, handle) for handle in (2, 3)]
    for output, params in zip(
        outputs,
        (PoolingParams(type=PoolingType.MEAN, is_normalized=True), PoolingParams("embed", PoolingType.MEAN, False, 2)),
        strict=True,
    ):
        assert output.finish.reason == pb.ENGINE_FINISH_REASON_STOP
        assert list(output.new_token_ids) == []
        assert output.prefill.prompt_tokens == len(PROMPT)
        found, expected = np.frombuffer(output.pooled, "<f4"), np.frombuffer(fake_vector(PROMPT, params), "<f4")
        np.testing.assert_array_equal(found, expected)
    stream.until_finished(1)
    assert len(stream.tokens[1]) == 40


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pooling": {"task": "classify"}}, "pooling.task"),
        ({"pooling": {**EMBED, "dimensions": HIDDEN_SIZE + 1}}, "pooling.dimensions"),
        ({"pooling": {**EMBED, "dimensions": 0}}, "pooling.dimensions"),
        ({"pooling": EMBED, "max_tokens": 3}, "max_tokens: 3"),
        ({"pooling": EMBED, "resume_output_token_ids": b"\x05\x00\x00\x00"}, "1 resumed tokens"),
        ({"pooling": EMBED, "logprobs": 0}, "logprobs"),
        ({"pooling": EMBED, "prompt_token_ids": b""}, "prompt_token_ids"),
        ({"pooling": EMBED, "prompt_token_ids": bytes(4 * 1001)}, "1001; the limit is 1000"),
    ],
)
def test_a_broken_promise_is_refused_and_the_session_lives(
    engine: RunningEngine, fields: dict[str, object], words: str
) -> None:
    stream = engine.connect("promises")
    stream.add(engine_request(1, PROMPT, **{"max_tokens": 0, **fields}))
    finish = output_of(stream, 1).finish
    assert (finish.reason, finish.error.reason) == (pb.ENGINE_FINISH_REASON_REJECTED, "FIELD_INVALID")
    assert words in finish.error.message
    stream.add(engine_request(2, PROMPT, 0, pooling=EMBED))
    assert output_of(stream, 2).pooled


def test_with_pooling_off_the_engine_says_so_and_refuses() -> None:
    with running_engine(*LIMITS, "--pooling", "off") as engine:
        stream = engine.connect()
        ready = stream.next().ready
        assert ready.embedding_dimensions == 0
        assert not any(feature.startswith("pooling") for feature in ready.features)
        stream.add(engine_request(1, PROMPT, 0, pooling=EMBED))
        error = output_of(stream, 1).finish.error
        assert (error.reason, error.message) == (
            "UNSUPPORTED_FEATURE",
            "pooling: this engine does not pool; --pooling is off",
        )
