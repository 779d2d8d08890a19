"""A word that stands in a request, or in its answer, stands in no log and in no error: of real processes, at DEBUG.

The word is in every field that takes text but those that name things: ids, models, adapters.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx2
import hypothesis
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from fakes.fake_executor import POISON_TOKEN, next_token
from fakes.fake_executor import VOCAB_SIZE as FAKE_VOCAB_SIZE
from fakes.hostile_json import bodies
from fakes.hostile_messages import Words, messages
from fakes.small_tokenizer import byte_level_tokenizer
from frontend.api.openai_http.chat_body import ChatBody
from frontend.api.openai_http.completion_body import CompletionBody
from frontend.api.openai_http.embedding_body import EmbeddingBody
from fuzzed_processes import FuzzedProcesses, fuzzed_processes
from running_frontend import request
from stepwire.v1 import (
    chat_service_pb2,
    common_pb2,
    embedding_service_pb2,
    generation_service_pb2,
    tokenization_service_pb2,
)

pytestmark = pytest.mark.slow

CANARY = "xyzzycanary"
# What the fake model has to say for its answer to be the canary: its tokens are characters, which the tokenizer shifts.
SPOKEN = "".join(chr(ord(character) - 31) for character in CANARY)
# Alone, and where a format would break off in the middle of it.
WORDS: Words = st.sampled_from(
    (
        CANARY,
        CANARY * 400,
        f"{{{{ {CANARY}.{CANARY}.x }}}}",
        f"{{% {CANARY} %}}",
        f"{{{{ raise_exception('{CANARY}') }}}}",
        f"({CANARY}",
        f'{{"{CANARY}": ',
        f'{{"type": "{CANARY}"}}',
        f'{{"type": "object", "{CANARY}": 1, "properties": {{"{CANARY}": {{"type": "{CANARY}"}}}}}}',
        f"root ::= {CANARY}",
    )
)
_PACKAGES = ("stepwire.", "vllm.")
_NAMES = ("request_id", "model", "lora_name")
_FLAGS = ("--log-level", "DEBUG")
_HELLO = chat_service_pb2.ContentPart(text=CANARY)
_CHAT = chat_service_pb2.ChatRequest(
    messages=[chat_service_pb2.Message(role=chat_service_pb2.ROLE_USER, content=[_HELLO])],
    tools=[chat_service_pb2.Tool(name="add", description=CANARY, parameters_json=f'{{"{CANARY}": 1}}')],
    stop=common_pb2.StopConditions(max_tokens=4, stop=[CANARY]),
)
_EMBEDDING = embedding_service_pb2.EmbedRequest(inputs=[embedding_service_pb2.EmbedRequest.Input(text=CANARY)])
_GATEWAY_SAMPLING = vllm_engine_pb2.SamplingParams(max_tokens=4, stop=[CANARY])
_GATEWAY = vllm_engine_pb2.GenerateRequest(
    tokenized=vllm_engine_pb2.TokenizedInput(original_text=CANARY, input_ids=[5, 6]),
    sampling_params=_GATEWAY_SAMPLING,
)
_CHAT_BODY = {"messages": [{"role": "user", "content": CANARY}], "stop": [CANARY], "max_tokens": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedProcesses]:
    with fuzzed_processes(tmp_path_factory.mktemp("canary"), *_FLAGS, engine_flags=_FLAGS) as processes:
        yield processes


def assert_not_logged(target: FuzzedProcesses, *words: str) -> None:
    log = "".join([*target.engine.log, *target.frontend.log])
    for word in words:
        place = log.find(word)
        assert place < 0, log[max(place - 500, 0) : place + 500]


def without_names(message: Message) -> Message:
    """The same without the fields that name things, wherever they are."""
    for field, value in message.ListFields():
        if field.name in _NAMES:
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.full_name.startswith(_PACKAGES):
            for part in value if field.is_repeated and not isinstance(value, dict) else [value]:
                if isinstance(part, Message):
                    without_names(part)
    return message


def refused() -> list[Message]:
    """One request for each check that looks at text."""
    structured, sampling = common_pb2.StructuredOutput, common_pb2.SamplingParams
    choice = structured.Choice(choices=[CANARY, ""])
    tools = [*_CHAT.tools, chat_service_pb2.Tool(name=f"{CANARY}!", parameters_json=f"{CANARY}")]
    hidden = chat_service_pb2.Message(role=chat_service_pb2.ROLE_USER, content=[_HELLO], tool_call_id=CANARY)
    return [
        request(CANARY, sampling=sampling(top_p=7)),
        request(CANARY * 100_000),
        request(CANARY, stop=common_pb2.StopConditions(stop=[CANARY * 4000, ""])),
        request(CANARY, sampling=sampling(bad_words=[CANARY * 4000, ""])),
        request(CANARY, structured_output=structured(regex=f"({CANARY}")),
        request(CANARY, structured_output=structured(json_schema=f'{{"{CANARY}": ')),
        request(CANARY, structured_output=structured(json_schema=f'{{"type": "{CANARY}"}}')),
        request(CANARY, structured_output=structured(grammar=CANARY)),
        request(CANARY, structured_output=structured(structural_tag=f'{{"{CANARY}": 1}}')),
        request(CANARY, structured_output=structured(choice=choice)),
        chat_service_pb2.ChatRequest(messages=_CHAT.messages, tools=tools),
        chat_service_pb2.ChatRequest(messages=[hidden, chat_service_pb2.Message(role=9, name=CANARY)]),
        chat_service_pb2.ChatRequest(messages=_CHAT.messages, chat_template=f"{{{{ raise_exception('{CANARY}') }}}}"),
        chat_service_pb2.ChatRequest(messages=_CHAT.messages, chat_template=f"{{% {CANARY} %}}"),
        chat_service_pb2.ChatRequest(messages=_CHAT.messages, chat_template=f"{{{{ {CANARY}.a.b }}}}"),
        chat_service_pb2.ChatRequest(
            messages=_CHAT.messages, tools=_CHAT.tools, tool_choice=chat_service_pb2.ToolChoice(function_name=CANARY)
        ),
        embedding_service_pb2.EmbedRequest(
            inputs=[_EMBEDDING.inputs[0], type(_EMBEDDING).Input(text=CANARY * 100_000)]
        ),
        gateway_message(regex=f"({CANARY}"),
        gateway_message(json_schema=f'{{"type": "{CANARY}"}}'),
        gateway_message(stop=[CANARY * 4000]),
    ]


def gateway_message(**sampling: object) -> vllm_engine_pb2.GenerateRequest:
    """The good one with other sampling parameters."""
    message = type(_GATEWAY)()
    message.CopyFrom(_GATEWAY)
    message.sampling_params.MergeFrom(vllm_engine_pb2.SamplingParams(**sampling))
    return message


def caller(target: FuzzedProcesses, message: Message) -> Callable[..., object]:
    """Sends messages of this type; an answer that streams is read to its end."""
    frontend = target.frontend
    gateway = vllm_engine_pb2_grpc.VllmEngineStub(frontend.channel)
    calls: dict[type[Message], Callable[..., object]] = {
        generation_service_pb2.GenerateRequest: frontend.generation.Generate,
        chat_service_pb2.ChatRequest: frontend.chat.Chat,
        embedding_service_pb2.EmbedRequest: frontend.embedding.Embed,
        tokenization_service_pb2.TokenizeRequest: frontend.tokenization.Tokenize,
        tokenization_service_pb2.RenderChatRequest: frontend.tokenization.RenderChat,
        vllm_engine_pb2.GenerateRequest: lambda sent, timeout: list(gateway.Generate(sent, timeout=timeout)),
    }
    return calls[type(message)]


@pytest.mark.parametrize("message", refused())
def test_a_refusal_quotes_nothing(target: FuzzedProcesses, message: Message) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        caller(target, message)(message, timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert CANARY not in f"{caught.value.details()} {caught.value.trailing_metadata()}"
    assert_not_logged(target, CANARY)


def test_grpc_errors_and_logs_have_nothing_of_requests(target: FuzzedProcesses) -> None:
    good_ones = [
        request(CANARY),
        _CHAT,
        _EMBEDDING,
        _GATEWAY,
        tokenization_service_pb2.RenderChatRequest(chat=_CHAT),
    ]
    # Hardly ever refused.
    tokenize = tokenization_service_pb2.TokenizeRequest(texts=[CANARY])
    num_refused = collections.Counter[type[Message]]()

    @given(st.one_of(*(messages(good, WORDS) for good in (*good_ones, tokenize))))
    @settings(max_examples=500, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    def check(message: Message) -> None:
        try:
            caller(target, message)(without_names(message), timeout=30)
            return
        except grpc.RpcError as error:
            told = f"{error.code()} {error.details()} {error.trailing_metadata()}"
        num_refused[type(message)] += 1
        assert CANARY not in told, (told, message)

    check()
    assert min(num_refused[type(good)] for good in good_ones) > 8, num_refused
    target.check_unharmed()
    assert_not_logged(target, CANARY)


def test_http_errors_and_logs_have_nothing_of_bodies(target: FuzzedProcesses) -> None:
    completion = {"prompt": CANARY, "stop": CANARY, "max_tokens": 4}
    kinds = {
        "/v1/completions": (CompletionBody, completion),
        "/v1/chat/completions": (ChatBody, _CHAT_BODY),
        "/v1/embeddings": (EmbeddingBody, {"input": CANARY}),
    }
    num_refused = collections.Counter[str]()
    requests = st.one_of(
        *(
            st.tuples(st.just(path), bodies([good], sorted({*kind.model_fields, CANARY} - set(_NAMES)), WORDS))
            for path, (kind, good) in kinds.items()
        )
    )

    with httpx2.Client(base_url=target.http_url, timeout=30) as http:

        @given(requests)
        @settings(max_examples=200, database=None, suppress_health_check=list(hypothesis.HealthCheck))
        def check(sent: tuple[str, bytes]) -> None:
            path, body = sent
            response = http.post(path, content=body, headers={"content-type": "application/json"})
            if response.status_code != 200:
                num_refused[path] += 1
                assert CANARY not in response.text, (response.text, body)

        check()
    assert min(num_refused[path] for path in kinds) > 10, num_refused
    target.check_unharmed()
    assert_not_logged(target, CANARY)


def test_logs_have_nothing_of_answers(target: FuzzedProcesses) -> None:
    frontend, num_tokens = target.frontend, len(CANARY)
    constraint = common_pb2.StructuredOutput(choice=common_pb2.StructuredOutput.Choice(choices=[SPOKEN]))
    few = common_pb2.StopConditions(max_tokens=num_tokens)
    chat = chat_service_pb2.ChatRequest(messages=_CHAT.messages, stop=few, structured_output=constraint)
    guided = {"prompt": "hello", "max_tokens": num_tokens, "guided_choice": [SPOKEN]}
    message = request("hello", max_tokens=num_tokens, structured_output=constraint)
    with httpx2.Client(base_url=target.http_url, timeout=30) as http:
        texts = [
            frontend.generation.Generate(message, timeout=30).completions[0].text,
            "".join(part.delta.text for part in frontend.generation.GenerateStream(message, timeout=30)),
            frontend.chat.Chat(chat, timeout=30).choices[0].message.content[0].text,
            http.post("/v1/completions", json=guided).json()["choices"][0]["text"],
        ]
    assert texts == [CANARY] * len(texts)
    # One word that is one token, for logs that are written token by token.
    [word_id] = byte_level_tokenizer().encode(" café")
    prompt = next(token_id for token_id in range(FAKE_VOCAB_SIZE) if next_token([token_id]) == word_id)
    body = {"prompt": [prompt], "max_tokens": 1, "stream": True}
    with httpx2.Client(base_url=target.http_url, timeout=30) as http:
        assert " café" in http.post("/v1/completions", json=body).text
    assert_not_logged(target, CANARY, SPOKEN, "café", r"caf\xe9", r"caf\u00e9")


def test_what_an_engine_says_when_it_dies_has_nothing_of_its_requests(tmp_path: Path) -> None:
    ids = [POISON_TOKEN, 361, 362, 363, 364]
    dying = generation_service_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=ids),
        stop=common_pb2.StopConditions(stop=[CANARY], stop_token_ids=[365, 366]),
        structured_output=common_pb2.StructuredOutput(regex=CANARY),
        kv=common_pb2.KvOptions(cache_salt=CANARY),
    )
    with fuzzed_processes(tmp_path, *_FLAGS, engine_flags=(*_FLAGS, "--fake-poisons")) as target:
        with pytest.raises(grpc.RpcError) as caught:
            target.frontend.generation.Generate(dying, timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert target.engine.wait() == 1
        assert any("ENGINE_CORE_DEAD" in line for line in target.engine.log)
        assert_not_logged(target, CANARY, "361, 362", "[365, 366]")
        assert CANARY not in f"{caught.value.details()} {caught.value.trailing_metadata()}"
