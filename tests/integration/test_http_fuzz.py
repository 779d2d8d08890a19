"""Hostile HTTP: what the OpenAPI document allows, JSON that nobody would allow, and templates that reach for more.

Each request is answered or refused in OpenAI's shape, none as a failure of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx2
import hypothesis
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fakes.hostile_json import bodies, values
from fakes.hostile_messages import texts
from fakes.hostile_templates import templates
from frontend.api.openai_http.chat_body import ChatBody
from frontend.api.openai_http.completion_body import CompletionBody
from frontend.api.openai_http.embedding_body import EmbeddingBody
from frontend.api.openai_http.service_routes import DetokenizeBody, TokenizeBody
from fuzzed_processes import FuzzedProcesses, fuzzed_processes
from fuzzing import Fuzzing

pytestmark = [pytest.mark.slow, pytest.mark.fuzz]

TIMEOUT_S = 30.0
# 501: asks for what this server does not do, images for example.
_ALLOWED = {200, 400, 404, 405, 409, 413, 415, 422, 429, 501, 504}
_DOCUMENTED = [status_code_conformance, content_type_conformance, response_schema_conformance]
_headers = st.dictionaries(
    st.sampled_from(("content-type", "x-request-id", "authorization", "x-data-parallel-rank", "accept", "traceparent")),
    st.sampled_from((b"", b"text/plain", b"7", b"-1", b"\xff\xfe", b"a" * 300, b"Bearer", b"%s{0}", "é".encode())),
    max_size=2,
)
_SETTINGS = {"derandomize": False, "database": None, "suppress_health_check": list(hypothesis.HealthCheck)}
_USER = {"role": "user", "content": "hello"}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
_CHATS: list[dict[str, object]] = [
    {"messages": [_USER], "max_tokens": 4},
    {"messages": [_USER, _CALL, {"role": "tool", "content": "3", "tool_call_id": "x"}], "max_tokens": 4},
    {"messages": [_USER], "tools": [_TOOL], "tool_choice": "required", "max_tokens": 4, "stream": True},
]
_GOOD: dict[str, tuple[type, list[dict[str, object]]]] = {
    "/v1/completions": (CompletionBody, [{"prompt": "hello", "max_tokens": 4}, {"prompt": [[5], [6]], "stream": True}]),
    "/v1/chat/completions": (ChatBody, _CHATS),
    "/v1/embeddings": (EmbeddingBody, [{"input": "hello"}, {"input": [[5, 6], [7]], "encoding_format": "base64"}]),
    "/tokenize": (TokenizeBody, [{"prompt": "hello"}, *_CHATS]),
    "/detokenize": (DetokenizeBody, [{"tokens": [5, 6]}]),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedProcesses]:
    with fuzzed_processes(tmp_path_factory.mktemp("fuzz")) as processes:
        yield processes


@pytest.fixture(scope="module")
def http(target: FuzzedProcesses) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=target.http_url, timeout=TIMEOUT_S) as client:
        yield client


def check_answer(status: int, text: str, sent: object) -> None:
    """Raises AssertionError for what is neither an answer nor a refusal in OpenAI's shape."""
    assert status in _ALLOWED, (status, text[:500], sent)
    if status != 200:
        assert '"error":{"message":' in text, (status, text[:500], sent)
    # An error behind the first event of a stream.
    assert '"type":"server_error"' not in text or status == 501, (text[-500:], sent)


def run(fuzzing: Fuzzing, target: FuzzedProcesses, check: Callable[[], None]) -> None:
    for seed in fuzzing.seeds():
        hypothesis.seed(seed)(check)()
        target.check_unharmed()


def test_what_the_openapi_document_allows(target: FuzzedProcesses, fuzzing: Fuzzing) -> None:
    schema = schemathesis.openapi.from_url(f"{target.http_url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= set(_GOOD)

    @given(st.one_of(*(operation.as_strategy() for operation in operations)))
    @settings(max_examples=120, **_SETTINGS)
    def check(case: schemathesis.Case) -> None:
        response = case.call(timeout=TIMEOUT_S)
        check_answer(response.status_code, response.text, (case.path, case.path_parameters, case.body))
        case.validate_response(response, checks=_DOCUMENTED)

    run(fuzzing, target, check)


def test_bodies_that_nobody_would_allow(target: FuzzedProcesses, fuzzing: Fuzzing, http: httpx2.Client) -> None:
    requests = st.one_of(
        *(
            st.tuples(st.just(path), bodies(good, sorted(kind.model_fields)), _headers)
            for path, (kind, good) in _GOOD.items()
        )
    )

    @given(requests)
    @settings(max_examples=250, **_SETTINGS)
    def check(request: tuple[str, bytes, dict[str, bytes]]) -> None:
        path, body, headers = request
        response = http.post(path, content=body, headers=headers)
        check_answer(response.status_code, response.text, (path, body[:2000], headers))

    run(fuzzing, target, check)


_names = texts.filter(lambda name: "\0" not in name) | st.sampled_from(("add", "a.b", "messages", "variable"))


@st.composite
def chats_with_templates(draw: st.DrawFn) -> dict[str, object]:
    """A chat with a template of its caller, variables for it, and tools with names that a template might trip over."""
    names = draw(st.lists(_names, max_size=2, unique=True))
    arguments = draw(st.sampled_from(("{}", "", "[", "null", '{"a": NaN}', "{{ messages }}")))
    tools = [{"type": "function", "function": {"name": name, "description": draw(texts)}} for name in names]
    calls = [{"id": draw(texts), "function": {"name": name, "arguments": arguments}} for name in names]
    return {
        "messages": [_USER, {"role": "assistant", "content": draw(texts), "tool_calls": calls}, _USER],
        "tools": tools or None,
        "tool_choice": draw(st.sampled_from((None, "auto", "none", "required"))),
        "chat_template": draw(st.none() | templates),
        "chat_template_kwargs": draw(st.dictionaries(_names, values(texts), max_size=3)),
        "continue_final_message": draw(st.booleans()),
        "max_tokens": 4,
        "stream": draw(st.booleans()),
    }


def test_templates_and_tools_that_reach_for_more(
    target: FuzzedProcesses, fuzzing: Fuzzing, http: httpx2.Client
) -> None:
    @given(chats_with_templates(), st.sampled_from(("/v1/chat/completions", "/tokenize")))
    @settings(max_examples=300, **_SETTINGS)
    def check(chat: dict[str, object], path: str) -> None:
        body = json.dumps(chat).encode()
        response = http.post(path, content=body, headers={"content-type": "application/json"})
        check_answer(response.status_code, response.text, (path, chat))

    run(fuzzing, target, check)
