"""Offline and the service with the real model: the same prompts, the same tokens and texts, the same errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fakes.offline_engine import assert_nothing_left
from frontend.chat_template import ChatTemplate
from offline import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from offline.generate_request import to_generate_request
from running_stack import SERVING, Frontend, running_stack
from stepwire.errors import StepwireError
from stepwire.v1 import common_pb2, generation_service_pb2

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
# Both sides: a cache that is small enough to preempt, and prompts that are cut into chunks.
ENGINE: dict[str, object] = {
    "device": "cpu",
    "dtype": "float32",
    "num_blocks": 96,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 32,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}

CASES: list[tuple[str | list[int], SamplingParams]] = [
    ("The capital of France is", GREEDY),
    ("def fibonacci(n):\n    ", GREEDY),
    ("日本の首都は", SamplingParams(temperature=0.0, max_tokens=20)),
    ("😀 😃 😄 😁 😆", GREEDY),
    ([504, 3575, 282, 4649, 314], GREEDY),
    ("Water boils at 100 degrees. " * 40, GREEDY),
    ("Once upon a time", SamplingParams(n=4, seed=5, temperature=1.0, max_tokens=16)),
    ("Once upon a time", SamplingParams(seed=-7, temperature=0.7, top_p=0.9, top_k=50, min_p=0.02, max_tokens=24)),
    ("My favourite colour is", SamplingParams(seed=2**63 - 1, temperature=1.3, repetition_penalty=1.2, max_tokens=24)),
    ("1 2 3 4 5 6 7 8 9", SamplingParams(temperature=0.0, max_tokens=200, stop=" 1", ignore_eos=True)),
    (
        "1 2 3 4 5 6 7 8 9",
        SamplingParams(temperature=0.0, max_tokens=200, stop=["1 1", "12"], include_stop_str_in_output=True),
    ),
    ("A B C D E F", SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[30], min_tokens=3)),
    (
        "The sea is",
        SamplingParams(temperature=0.0, max_tokens=10, bad_words=["a", "beautiful"], logit_bias={260: -9.0}),
    ),
    ("The sea is", SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=1, logprob_token_ids=[5])),
    ("Yes or no? ", SamplingParams(max_tokens=8, seed=1, structured_outputs=StructuredOutputsParams(choice=["yes"]))),
    ("JSON: ", SamplingParams(max_tokens=40, seed=2, structured_outputs=StructuredOutputsParams(json=SCHEMA))),
    ("word " * 600, SamplingParams(temperature=0.0, max_tokens=5, truncate_prompt_tokens=20)),
    ("Hello", SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)),
]
REFUSED: list[tuple[str | list[int], SamplingParams]] = [
    ("x", SamplingParams(top_p=7.0)),
    ("x", SamplingParams(temperature=0.0, n=3)),
    ("", SamplingParams()),
    ([5, 4_000_000], SamplingParams()),
    ("word " * 600, SamplingParams()),
    ("x", SamplingParams(max_tokens=0)),
    ("x", SamplingParams(logprobs=21)),
    ("x", SamplingParams(stop=[""], min_tokens=5, max_tokens=2)),
    ("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(["))),
    ("x", SamplingParams(structured_outputs=StructuredOutputsParams(json='{"not": {}}'))),
]


@pytest.fixture(scope="module")
def service(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    flags = [word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        frontend = stack.frontend(stack.engine(*flags))
        frontend.wait_for_health(SERVING)
        yield frontend


@pytest.fixture(scope="module")
def llm(embedded_model_dir: Path) -> Iterator[LLM]:
    with LLM(str(embedded_model_dir), **ENGINE) as llm:
        yield llm
        assert_nothing_left(llm.llm_engine)


def ask(service: Frontend, prompt: str | list[int], params: SamplingParams) -> generation_service_pb2.GenerateResponse:
    request = to_generate_request(prompt, params, add_special_tokens=True)
    return service.generation.Generate(request, timeout=TIMEOUT_S)


def assert_same(output: RequestOutput, answer: generation_service_pb2.GenerateResponse) -> None:
    assert output.error is None
    assert [choice.token_ids for choice in output.outputs] == [list(one.token_ids) for one in answer.completions]
    assert [choice.text for choice in output.outputs] == [one.text for one in answer.completions]
    for choice, completion in zip(output.outputs, answer.completions, strict=True):
        reason = common_pb2.FinishReason.Name(completion.reason)
        assert f"FINISH_REASON_{choice.finish_reason}".upper() == reason
        kind = completion.stop_match.WhichOneof("match")
        is_named = kind in ("stop_string", "stop_token_id")
        assert choice.stop_reason == (getattr(completion.stop_match, kind) if is_named else None)
        expected = [(row.sampled.token_id, row.sampled.logprob, len(row.top)) for row in completion.logprobs]
        found = [(next(iter(row)), next(iter(row.values())).logprob) for row in choice.logprobs or []]
        assert [item[0] for item in found] == [item[0] for item in expected]
        assert [item[1] for item in found] == pytest.approx([item[1] for item in expected], abs=1e-3)
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )


def test_a_batch_of_everything_equals_the_service(llm: LLM, service: Frontend) -> None:
    prompts, params = [prompt for prompt, _ in CASES], [params for _, params in CASES]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, (prompt, one) in zip(outputs, CASES, strict=True):
        assert_same(output, ask(service, prompt, one))
    assert any(choice.stop_reason == " 1" for output in outputs for choice in output.outputs)
    assert len({choice.text for choice in outputs[6].outputs}) > 1
    assert_nothing_left(llm.llm_engine)


def test_a_batch_that_does_not_fit_the_cache_equals_one_by_one(llm: LLM) -> None:
    prompts = [f"Story number {number}: once upon a time there was" for number in range(14)]
    params = [SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True) for _ in prompts]
    together = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.llm_engine._client._core.scheduler.stats()  # type: ignore[union-attr]
    assert stats.num_preemptions > 0
    for index in (0, 13):
        [alone] = llm.generate(prompts[index], params[index], use_tqdm=False)
        assert alone.outputs == together[index].outputs
    assert_nothing_left(llm.llm_engine)


def test_the_same_requests_are_refused_for_the_same_reasons(llm: LLM, service: Frontend) -> None:
    prompts, params = [prompt for prompt, _ in REFUSED], [params for _, params in REFUSED]
    good = llm.generate("The sea is", GREEDY, use_tqdm=False)[0].outputs
    outputs = llm.generate([*prompts, "The sea is"], [*params, GREEDY], use_tqdm=False, return_errors=True)
    assert outputs[-1].outputs == good
    for output, (prompt, one) in zip(outputs, REFUSED, strict=False):
        with pytest.raises(grpc.RpcError) as refused:
            ask(service, prompt, one)
        status, info = rpc_status.from_call(refused.value), error_details_pb2.ErrorInfo()  # type: ignore[arg-type]
        assert any(detail.Unpack(info) for detail in status.details)
        assert output.error is not None
        assert (output.error.reason, output.error.message) == (info.reason, refused.value.details())
        with pytest.raises(StepwireError) as raised:
            llm.generate(prompt, one, use_tqdm=False)
        assert type(raised.value) is type(output.error)
        assert raised.value.reason == info.reason
    llm.llm_engine.step()
    assert_nothing_left(llm.llm_engine)


def test_chat_equals_the_service_with_the_template_of_transformers(
    llm: LLM, service: Frontend, embedded_model_dir: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(embedded_model_dir)
    conversations = [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "¿Cómo estás? 😀 <b>&\"'"}],
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "Bye"},
        ],
    ]
    outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    for output, conversation in zip(outputs, conversations, strict=True):
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert output.prompt == text
        request = to_generate_request(text, GREEDY, add_special_tokens=False)
        assert_same(output, service.generation.Generate(request, timeout=TIMEOUT_S))
    assert "Paris" in outputs[0].outputs[0].text


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\n"
        "[INST] {{ m.content | trim }} [/INST]\n    {% else %}\n{{ m.content }}{{ eos_token }}\n"
        "{% endif %}\n{% endfor %}",
        "{%- if tools is not none and tools %}x{%- endif %}{{- messages | tojson(indent=2) }}{{ undefined }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m['content'].split(' ') }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ pad_token }}{% endfor %}",
    ],
)
def test_templates_render_as_in_transformers(embedded_model_dir: Path, source: str) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(embedded_model_dir)
    messages = [{"role": "user", "content": " Hello <world> é "}, {"role": "assistant", "content": "Hi"}]
    expected = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate.from_directory(embedded_model_dir).with_source(source).render(messages) == expected


def test_closing_gives_the_memory_back(embedded_model_dir: Path) -> None:
    process = psutil.Process()
    llm = LLM(str(embedded_model_dir), **{**ENGINE, "num_blocks": 512})
    llm.generate("Hello", GREEDY, use_tqdm=False)
    runner = llm.llm_engine._client._core.executor._runner  # type: ignore[union-attr]
    is_alive = weakref.ref(runner)
    del runner
    before = process.memory_info().rss
    llm.close()
    gc.collect()
    assert is_alive() is None
    # The weights alone are 538 MB.
    assert before - process.memory_info().rss > 400 * 2**20
    assert gc.get_freeze_count() == 0
