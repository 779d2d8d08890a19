"""OpenAI's bodies as messages of the gRPC API, parts put together to choices, and errors in the caller's words."""

from __future__ import annotations

import json
import re

import pytest
from pydantic import ValidationError

from frontend.api.openai_http import completion_body
from frontend.api.openai_http.chat_body import ChatBody
from frontend.api.openai_http.completion_body import CompletionBody
from frontend.api.openai_http.embedding_body import EmbeddingBody
from frontend.api.openai_http.errors import headers_of, invalid_body, status_of, to_body
from frontend.api.openai_http.merging import WholeChoices
from frontend.api.openai_http.service_routes import DetokenizeBody
from stepwire.errors import FieldViolation, InvalidRequestError, OverloadedError
from stepwire.grpc_errors import REASONS
from stepwire.v1 import chat_service_pb2, common_pb2

USER = {"role": "user", "content": "x"}


def completion(**fields: object) -> CompletionBody:
    return CompletionBody.model_validate_json(json.dumps({"prompt": "x", **fields}))


def chat(**fields: object) -> ChatBody:
    return ChatBody.model_validate_json(json.dumps({"messages": [USER], **fields}))


def test_what_is_not_said_is_left_to_the_model():
    [request], _ = completion(temperature=None).to_requests(1)
    assert request.sampling == common_pb2.SamplingParams()
    assert request.stop == common_pb2.StopConditions(max_tokens=16)
    assert not request.HasField("structured_output")
    assert not chat().to_request()[0].stop.HasField("max_tokens")


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [("ab", ["ab"], []), (["a", "b"], ["a", "b"], []), ([1, 2], [], [[1, 2]]), ([[1], [2, 3]], [], [[1], [2, 3]])],
)
def test_the_four_kinds_of_prompts(prompt, texts, ids):
    requests, _ = completion(prompt=prompt).to_requests(2)
    assert [request.text for request in requests if request.HasField("text")] == texts
    assert [list(request.token_ids.ids) for request in requests if request.HasField("token_ids")] == ids


def test_prompts_are_counted_before_a_request_is_made_of_any(monkeypatch: pytest.MonkeyPatch):
    made: list[object] = []
    monkeypatch.setattr(completion_body, "_with_prompt", lambda *given: made.append(given))
    with pytest.raises(InvalidRequestError, match="9 prompts are more than the limit of 8") as caught:
        completion(prompt=["a"] * 9).to_requests(8)
    assert [violation.field for violation in caught.value.violations] == ["prompt"]
    assert made == []


@pytest.mark.parametrize(
    ("body_type", "fields"),
    [
        (CompletionBody, {"prompt": ["a"] * 100_000}),
        (CompletionBody, {"prompt": [[1]] * 100_000}),
        (CompletionBody, {"prompt": "x", "logit_bias": {str(token_id): 1 for token_id in range(2000)}}),
        (CompletionBody, {"prompt": "x", "stop": ["a"] * 300}),
        (CompletionBody, {"prompt": "x", "bad_words": ["a"] * 2000}),
        (CompletionBody, {"prompt": "x", "stop_token_ids": [1] * 2000}),
        (ChatBody, {"messages": [USER] * 20_000}),
        (ChatBody, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}] * 200}),
        (EmbeddingBody, {"input": ["a"] * 100_000}),
        (DetokenizeBody, {"tokens": [1] * 300_000}),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_a_list_that_is_absurdly_long_is_given_up_and_named(body_type, fields):
    with pytest.raises(ValidationError) as caught:
        body_type.model_validate_json(json.dumps(fields))
    [violation] = invalid_body(caught.value).violations
    assert violation.field == next(reversed(fields))
    assert re.fullmatch(r"at most \d+ entries are allowed", violation.description)


def test_off_and_zero_are_kept_apart_from_unset():
    [request], _ = completion(temperature=0, top_k=-1, logprobs=0, max_tokens=0).to_requests(1)
    assert (request.sampling.temperature, request.sampling.top_k) == (0, -1)
    assert request.sampling.HasField("temperature")
    assert request.output.HasField("logprobs")
    assert request.stop.HasField("max_tokens")


def test_tools_and_their_choice():
    parameters = {"type": "object", "properties": {"z": {}, "a": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    named = {"type": "function", "function": {"name": "f"}}
    request, _ = chat(tools=[tool], tool_choice=named).to_request()
    assert (request.tools[0].name, request.tools[0].strict) == ("f", True)
    # The order of the keys is the caller's.
    assert request.tools[0].parameters_json == json.dumps(parameters)
    assert request.tool_choice.function_name == "f"
    required, _ = chat(tools=[tool], tool_choice="required").to_request()
    assert required.tool_choice.mode == chat_service_pb2.ToolChoice.MODE_REQUIRED
    assert not chat(tools=[tool]).to_request()[0].HasField("tool_choice")


def test_a_message_that_answers_a_call():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "why"}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    request, _ = chat(messages=[USER, asked, answered]).to_request()
    assert [message.role for message in request.messages] == [2, 3, 4]
    assert (request.messages[1].tool_calls[0].id, request.messages[1].reasoning) == ("c1", "why")
    assert request.messages[2].tool_call_id == "c1"


def test_the_newer_name_of_the_limit_wins_and_is_named():
    request, names = chat(max_tokens=5, max_completion_tokens=7).to_request()
    assert request.stop.max_tokens == 7
    error = InvalidRequestError.of_field("stop.max_tokens", "0 is less than 1")
    assert to_body(error, names)["error"]["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "json_schema"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice"),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema"),
        ({"guided_grammar": "root ::= 'a'"}, "grammar"),
        ({"response_format": {"type": "text"}}, None),
    ],
)
def test_constraints(fields, kind):
    assert chat(**fields).to_request()[0].structured_output.WhichOneof("spec") == kind


def test_a_number_beyond_a_double_in_template_variables_is_refused():
    with pytest.raises(InvalidRequestError) as caught:
        ChatBody.model_validate_json(
            json.dumps({"messages": [USER], "chat_template_kwargs": {"a": 10**400}})
        ).to_request()
    assert caught.value.violations[0].field == "chat_template_kwargs"


def test_a_body_of_wrong_types_is_told_by_field_and_without_its_values():
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate_json(json.dumps({"messages": [{"role": "user", "content": 5}], "seed": "canary"}))
    error = to_body(invalid_body(caught.value))["error"]
    assert {item.field for item in invalid_body(caught.value).violations} == {"messages[0].content", "seed"}
    assert "canary" not in error["message"]


def test_every_reason_has_a_status_of_an_error():
    assert all(400 <= status_of(InvalidRequestError("x", reason=reason)) < 600 for reason in REASONS)


def test_advice_on_retries():
    error = OverloadedError("full", retry_after_ms=1200)
    assert headers_of(error) == {"x-should-retry": "true", "retry-after": "2", "retry-after-ms": "1200"}
    assert to_body(error)["error"]["type"] == "rate_limit_error"


def test_fields_have_the_callers_names():
    violations = (FieldViolation("sampling.top_p", "too large"), FieldViolation("token_ids.ids[3]", "odd"))
    error = to_body(InvalidRequestError("", violations=violations))["error"]
    assert error["message"] == "top_p: too large; prompt[3]: odd"
    assert error["param"] == "top_p"


def test_fragments_of_calls_become_whole_ones():
    def part(**delta: object) -> dict[str, object]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}

    first = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    whole = WholeChoices()
    whole.add([part(role="assistant", content=""), part(reasoning_content="hm"), part(tool_calls=[first])])
    whole.add([part(tool_calls=[rest]), {**part(), "finish_reason": "tool_calls"}])
    [choice] = whole.chats()
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (None, "hm")
    assert choice["finish_reason"] == "tool_calls"
