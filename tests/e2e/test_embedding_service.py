"""Vectors through both real processes and the real model: as transformers makes them, beside answers that stream.

Asked over gRPC, by OpenAI's client, and as gateways ask, who also follow what the prefix cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import torch
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as smg_common_pb2
from transformers import AutoTokenizer

from fakes.tiny_models import load_reference
from free_ports import free_port
from running_stack import SERVING, Frontend, Service, running_stack, wait_until_zero
from smg_gateway import gateway_program, running_gateway
from stepwire.v1 import common_pb2
from stepwire.v1.embedding_service_pb2 import EmbedRequest
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
TOLERANCE = 1e-4
WITHIN_S = 30.0
SHORT = "Paris is the capital of France."
# More than a step's share of prompts beside decodes, so that it is computed in chunks.
LONG = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 12


class Running(NamedTuple):
    engine: Service
    frontend: Frontend
    http_port: int


@pytest.fixture(scope="module")
def running(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        engine = stack.engine("--pooling", "mean", "--enable-kv-events")
        port = free_port()
        frontend = stack.frontend(engine, http_port=port, flags=("--relay-kv-events",))
        frontend.wait_for_health(SERVING)
        yield Running(engine, frontend, port)


@pytest.fixture(scope="module")
def expected(embedded_model_dir: Path) -> dict[str, np.ndarray]:
    """The mean of transformers' last hidden states, scaled to unit length."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir)
    model: Any = load_reference(embedded_model_dir).base_model
    vectors = {}
    for text in (SHORT, LONG):
        with torch.inference_mode():
            hidden = model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0].double()
        mean = hidden.mean(dim=0)
        vectors[text] = (mean / mean.norm()).numpy()
    return vectors


def assert_close(found: object, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found), expected, rtol=0, atol=TOLERANCE)


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up, "it did not become so"
        time.sleep(0.1)


def text_inputs(*texts: str) -> list[EmbedRequest.Input]:
    return [EmbedRequest.Input(text=text) for text in texts]


def test_vectors_are_transformers_also_beside_answers_that_stream(
    running: Running, expected: dict[str, np.ndarray]
) -> None:
    stop = common_pb2.StopConditions(max_tokens=48, ignore_eos=True)
    request = GenerateRequest(text="Once upon a time", stop=stop)
    with ThreadPoolExecutor(1) as pool:
        stream = running.frontend.generation.GenerateStream(request, timeout=TIMEOUT_S)
        # Accepted, and the first token: from now on it decodes.
        assert [next(stream).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
        answer = pool.submit(list, stream)
        embed = EmbedRequest(inputs=text_inputs(LONG, SHORT, LONG))
        response = running.frontend.embedding.Embed(embed, timeout=TIMEOUT_S)
        assert answer.result()[-1].finished.usage.completion_tokens == 48
    for one, text in zip(response.embeddings, (LONG, SHORT, LONG), strict=True):
        assert_close(one.values, expected[text])
    assert response.usage.prompt_tokens > 300
    # All tokens of a mean are computed, whatever the prefix cache has.
    assert response.usage.cached_prompt_tokens == 0
    wait_until_zero(running.engine, "stepwire_engine_core_kv_cache_usage_ratio")


def test_openais_client_gets_them(running: Running, expected: dict[str, np.ndarray]) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{running.http_port}/v1", api_key="any", max_retries=0) as client:
        model = client.models.list().data[0].id
        for encoding in ("float", openai.NOT_GIVEN):
            answer = client.embeddings.create(model=model, input=[SHORT, LONG], encoding_format=encoding)
            for one, text in zip(answer.data, (SHORT, LONG), strict=True):
                assert_close(one.embedding, expected[text])
        cut = client.embeddings.create(model=model, input=SHORT, dimensions=64).data[0].embedding
        assert_close(cut, expected[SHORT][:64] / np.linalg.norm(expected[SHORT][:64]))


def test_a_gateways_protocol_gives_vectors_and_what_the_cache_holds(
    running: Running, expected: dict[str, np.ndarray], embedded_model_dir: Path
) -> None:
    gateway = vllm_engine_pb2_grpc.VllmEngineStub(running.frontend.channel)
    feed = gateway.SubscribeKvEvents(smg_common_pb2.SubscribeKvEventsRequest(), timeout=TIMEOUT_S)
    assert next(feed).HasField("snapshot")
    token_ids = AutoTokenizer.from_pretrained(embedded_model_dir).encode("Something else. " + LONG)
    tokenized = vllm_engine_pb2.TokenizedInput(input_ids=token_ids)
    response = gateway.Embed(vllm_engine_pb2.EmbedRequest(tokenized=tokenized), timeout=TIMEOUT_S)
    assert response.embedding_dim == len(expected[SHORT])
    # Pooling writes the prefix cache.
    blocks = [block for event in next(feed).events for block in event.stored.blocks]
    assert [token_id for block in blocks for token_id in block.token_ids] == token_ids[: 16 * len(blocks)]
    feed.cancel()


def test_the_smg_gateway_routes_embeddings_and_follows_the_cache(
    running: Running, expected: dict[str, np.ndarray], embedded_model_dir: Path, tmp_path: Path
) -> None:
    gateway_program()
    log = tmp_path / "smg.log"
    options = {"policy": "cache_aware", "log_level": "info"}
    with (
        running_gateway(running.frontend.port, embedded_model_dir, log, **options) as url,
        openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client,
    ):
        model = client.models.list().data[0].id
        answer = client.embeddings.create(model=model, input=SHORT, encoding_format="float")
        assert_close(answer.data[0].embedding, expected[SHORT])
        client.embeddings.create(model=model, input="New to the cache. " + LONG)
        # In the gateway's own words.
        for words in ("snapshot applied", "Learned block_size"):
            wait_until(lambda words=words: words in log.read_text(errors="replace"))
