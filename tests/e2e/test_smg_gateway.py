"""The smg gateway in front of both real processes and the real model, asked by OpenAI's own client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import openai
import pytest

from free_ports import free_port
from running_stack import SERVING, Frontend, Service, running_stack, wait_until_zero
from smg_gateway import gateway_program, running_gateway

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
STORY = "Once upon a time"
# From the frontend's own recovery on; the gateway asks for health every 2 s, and a machine may be busy.
RECOVERY_WITHIN_S = 20.0


class Gateway(NamedTuple):
    """The gateway's client, and what stands behind it."""

    client: openai.OpenAI
    model: str
    engine: Service
    frontend: Frontend
    # Starts another engine at the address of the first.
    start_engine: Callable[[], Service]


@pytest.fixture(scope="module")
def gateway(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway_program()
    directory, port = tmp_path_factory.mktemp("smg"), free_port()
    with running_stack(embedded_model_dir, directory) as stack:
        engine = stack.engine(port=port)
        frontend = stack.frontend(engine)
        frontend.wait_for_health(SERVING)
        with (
            running_gateway(frontend.port, embedded_model_dir, directory / "smg.log") as url,
            openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client,
        ):
            model = client.models.list().data[0].id
            yield Gateway(client, model, engine, frontend, lambda: stack.engine(port=port))


def wait_until(condition: Callable[[], bool], within_s: float) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "it did not become so"
        time.sleep(0.1)


def wait_until_idle(gateway: Gateway) -> None:
    """No request in the frontend, and no KV block in use in the engine."""
    wait_until_zero(gateway.frontend, "stepwire_frontend_requests_in_flight")
    wait_until_zero(gateway.engine, "stepwire_engine_core_kv_cache_usage_ratio")


def test_chat_whole_and_streamed(gateway: Gateway) -> None:
    options = {"model": gateway.model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = gateway.client.chat.completions.create(**options)
    chunks = list(gateway.client.chat.completions.create(**options, stream=True))
    assert "Paris" in whole.choices[0].message.content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens > 0


def test_completion_whole_and_streamed(gateway: Gateway) -> None:
    options = {"model": gateway.model, "prompt": STORY, "max_tokens": 8, "temperature": 0}
    whole = gateway.client.completions.create(**options)
    chunks = list(gateway.client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 8)


def test_n_choices(gateway: Gateway) -> None:
    answer = gateway.client.chat.completions.create(
        model=gateway.model, messages=QUESTION, max_tokens=4, temperature=1, n=2, seed=3
    )
    assert sorted(choice.index for choice in answer.choices) == [0, 1]


def test_a_stop_string_ends_the_engine_early(gateway: Gateway) -> None:
    name = "stepwire_frontend_request_generation_tokens_sum"
    before = gateway.frontend.metric(name)
    answer = gateway.client.completions.create(
        model=gateway.model, prompt="1, 2, 3, 4, 5,", max_tokens=1000, temperature=0, stop=["9"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "9" not in answer.choices[0].text
    wait_until_idle(gateway)
    assert gateway.frontend.metric(name) - before < 100


def test_a_client_that_leaves_a_stream_ends_its_request(gateway: Gateway) -> None:
    stream = gateway.client.completions.create(
        model=gateway.model, prompt=STORY, max_tokens=4000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert gateway.frontend.metric("stepwire_frontend_requests_in_flight") == 1
    stream.close()
    wait_until_idle(gateway)


def test_a_client_that_leaves_an_answer_at_once_ends_its_request(gateway: Gateway) -> None:
    with pytest.raises(openai.APITimeoutError):
        gateway.client.with_options(timeout=1).completions.create(
            model=gateway.model, prompt=STORY, max_tokens=4000, temperature=0, extra_body={"ignore_eos": True}
        )
    wait_until_idle(gateway)


def test_a_refused_field_is_400(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError):
        gateway.client.completions.create(model=gateway.model, prompt="word " * 20_000, max_tokens=4)


def test_a_killed_engine_ends_its_streams_and_the_next_one_serves(gateway: Gateway) -> None:
    stream = gateway.client.completions.create(
        model=gateway.model, prompt=STORY, max_tokens=4000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    gateway.engine.kill()
    with pytest.raises(openai.APIError):
        list(stream)
    with pytest.raises(openai.APIStatusError) as refused:
        gateway.client.completions.create(model=gateway.model, prompt=STORY, max_tokens=4)
    assert refused.value.status_code == 503

    gateway.start_engine()
    gateway.frontend.wait_for_health(SERVING)
    wait_until(lambda: _answers(gateway), RECOVERY_WITHIN_S)


def _answers(gateway: Gateway) -> bool:
    try:
        return bool(gateway.client.completions.create(model=gateway.model, prompt=STORY, max_tokens=4).choices)
    except openai.APIStatusError:
        return False
