"""Hostile HTTP: what the OpenAPI document allows, JSON that nobody would allow, and templates that reach for more.

Each request is answered or refused in OpenAI's shape, none as a failure of ours.
"""

from __future__ import annotations

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

from fakes.hostile_json import bodies
from frontend.api.openai_http.chat_body import ChatBody
from frontend.api.openai_http.completion_body import CompletionBody
from frontend.api.openai_http.service_routes import DetokenizeBody, TokenizeBody
from fuzzed_processes import FuzzedProcesses, fuzzed_processes
from fuzzing import Fuzzing

pytestmark = [pytest.mark.slow, pytest.mark.fuzz]

TIMEOUT_S = 10.0
# 501: asks for what this server does not do, images for example.
_ALLOWED = {200, 400, 404, 405, 409, 413, 415, 422, 429, 501, 504}
_DOCUMENTED = [status_code_conformance, content_type_conformance, response_schema_conformance]
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
    @settings(max_examples=200, **_SETTINGS)
    def check(case: schemathesis.Case) -> None:
        response = case.call(timeout=TIMEOUT_S)
        check_answer(response.status_code, response.text, (case.path, case.path_parameters, case.body))
        case.validate_response(response, checks=_DOCUMENTED)

    run(fuzzing, target, check)


def test_bodies_that_nobody_would_allow(target: FuzzedProcesses, fuzzing: Fuzzing, http: httpx2.Client) -> None:
    requests = st.one_of(
        *(st.tuples(st.just(path), bodies(good, sorted(kind.model_fields))) for path, (kind, good) in _GOOD.items())
    )

    @given(requests)
    @settings(max_examples=400, **_SETTINGS)
    def check(request: tuple[str, bytes]) -> None:
        path, body = request
        response = http.post(path, content=body, headers={"content-type": "application/json"})
        check_answer(response.status_code, response.text, (path, body[:2000]))

    run(fuzzing, target, check)
