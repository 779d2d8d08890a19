"""The words of `expect`: each holds for what it means, and fails for something else."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from conformance import scenarios
from conformance.checks import CHECKS, check
from conformance.runners import RESPONSES, Reply


def reply_of(method: str, *messages: dict[str, Any], code: str = "OK", **fields: Any) -> Reply:
    return Reply([ParseDict(message, RESPONSES[method]()) for message in messages], code, **fields)


def row(token_id: int, text: str) -> dict[str, Any]:
    return {"sampled": {"token_id": token_id, "token_bytes": text}, "top": [{"rank": 1}]}


STREAM = reply_of(
    "GenerationService/GenerateStream",
    {"accepted": {"seed": "7"}},
    {"index": 1, "delta": {"text": "ab", "token_ids": [1], "logprobs": [row(1, "YWI=")]}},
    {"index": 2, "delta": {"text": "c", "token_ids": [2], "logprobs": [row(2, "Yw==")]}},
    {"index": 3, "finished": {"reason": "FINISH_REASON_STOP"}},
)
GAP = reply_of("GenerationService/GenerateStream", {"accepted": {}}, {"index": 2, "delta": {}})
START = reply_of("GenerationService/GenerateStream", {"delta": {"text": "ab", "token_ids": [1]}})
REST = reply_of("GenerationService/GenerateStream", {"delta": {"text": "c", "token_ids": [2]}})
JSON = reply_of("GenerationService/Generate", {"completions": [{"text": '{"a": 1}'}]})
CHAT = reply_of(
    "ChatService/Chat",
    {"choices": [{"message": {"tool_calls": [{"name": "f", "arguments": '{"a": 1}'}], "content": [{"text": "abc"}]}}]},
)
VECTORS = reply_of("EmbeddingService/Embed", {"embeddings": [{"values": [0.6, -0.8]}, {"values": [1, 0]}]})
TEXTS = reply_of("TokenizationService/Detokenize", {"texts": ["abc", ""]})
ERROR = reply_of(
    "GenerationService/Generate",
    code="INVALID_ARGUMENT",
    message="top_p is 7",
    reason="FIELD_INVALID",
    error_metadata={"retryable": "false"},
    trailers={"load": "cpu=1"},
    field_violations=[{"field": "top_p", "description": "too large"}],
)
SAVED = {"whole": STREAM, "start": START, "rest": REST}

# word -> (reply, what holds of it, what does not)
EXAMPLES: dict[str, tuple[Reply, Any, Any]] = {
    "code": (ERROR, "INVALID_ARGUMENT", "OK"),
    "reason": (ERROR, "FIELD_INVALID", "INTERNAL"),
    "fields": (ERROR, ["top_p"], ["top_k"]),
    "error_metadata": (ERROR, {"retryable": "false"}, {"request_id": "x"}),
    "message": (ERROR, "top_p", "top_k"),
    "kinds": (STREAM, ["accepted", "delta", "finished"], ["accepted", "finished"]),
    "num_messages": (STREAM, 4, 3),
    "num_choices": (STREAM, 1, 2),
    "contains": (STREAM, "bc", "cb"),
    "lacks": (STREAM, "cb", "bc"),
    "text": (STREAM, "abc", "ab"),
    "same_text": (CHAT, "whole", "start"),
    "completes": (REST, ["start", "whole"], ["whole", "whole"]),
    "values": (STREAM, {"finished.reason": "FINISH_REASON_STOP"}, {"finished.reason": "FINISH_REASON_LENGTH"}),
    "first_values": (STREAM, {"accepted.seed": 7}, {"accepted.seed": 8}),
    "trailers": (ERROR, {"load": "cpu"}, {"load": "gpu"}),
    "json_keys": (JSON, ["a"], ["b"]),
    "num_logprobs": (STREAM, 1, 2),
    "tool_call": (CHAT, {"name": "f", "keys": ["a"]}, {"name": "f", "keys": ["b"]}),
    "vectors": (
        VECTORS,
        {"count": 2, "dimensions": 2, "are_units": True},
        {"count": 2, "dimensions": 2, "are_units": False},
    ),
    "text_lengths": (TEXTS, [3, 0], [3]),
}


@pytest.mark.parametrize("word", CHECKS)
def test_a_word_holds_and_fails(word: str):
    reply, right, wrong = EXAMPLES[word]
    CHECKS[word](reply, right, SAVED)
    with pytest.raises(AssertionError):
        CHECKS[word](reply, wrong, SAVED)


def test_a_gap_in_the_indices_is_noticed():
    with pytest.raises(AssertionError):
        check(GAP, {"kinds": ["accepted", "delta"]}, {})


def test_a_call_that_fails_is_an_error_unless_it_is_expected():
    with pytest.raises(AssertionError):
        check(ERROR, {}, {})


def test_words_and_paths_that_do_not_exist_are_errors():
    with pytest.raises(KeyError):
        check(STREAM, {"contians": "ab"}, {})
    with pytest.raises(KeyError):
        check(STREAM, {"values": {"finished.raeson": "x"}}, {})


def test_scenarios_use_known_words_and_have_names_of_their_own():
    loaded = scenarios.load()
    assert {word for scenario in loaded for step in scenario.steps for word in step.expect} == set(CHECKS)
    assert len({scenario.name for scenario in loaded}) == len(loaded) > 20
