"""SamplingParams as messages of the public API: every field arrives, and what no message can hold names its field."""

from __future__ import annotations

from dataclasses import fields

import pytest

from offline.generate_request import to_generate_request
from offline.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from stepwire.errors import InvalidRequestError
from stepwire.v1.generation_service_pb2 import GenerateRequest

# Field of SamplingParams: a value, and the field of the message that has to hold it.
PLACES: dict[str, tuple[object, str]] = {
    "n": (3, "sampling.n"),
    "temperature": (0.5, "sampling.temperature"),
    "top_p": (0.25, "sampling.top_p"),
    "top_k": (-1, "sampling.top_k"),
    "min_p": (0.125, "sampling.min_p"),
    "presence_penalty": (0.5, "sampling.presence_penalty"),
    "frequency_penalty": (-0.5, "sampling.frequency_penalty"),
    "repetition_penalty": (1.5, "sampling.repetition_penalty"),
    "seed": (0, "sampling.seed"),
    "logit_bias": ({5: 1.5}, "sampling.logit_bias"),
    "allowed_token_ids": ([4, 5], "sampling.allowed_token_ids"),
    "bad_words": (["bad"], "sampling.bad_words"),
    "max_tokens": (7, "stop.max_tokens"),
    "min_tokens": (0, "stop.min_tokens"),
    "stop": (["a", "b"], "stop.stop"),
    "stop_token_ids": ([8], "stop.stop_token_ids"),
    "ignore_eos": (True, "stop.ignore_eos"),
    "include_stop_str_in_output": (True, "stop.include_stop_in_output"),
    "logprobs": (0, "output.logprobs"),
    "prompt_logprobs": (-1, "output.prompt_logprobs"),
    "logprob_token_ids": ([1, 2], "output.logprob_token_ids"),
    "detokenize": (False, "output.text"),
    "skip_special_tokens": (False, "output.skip_special_tokens"),
    "truncate_prompt_tokens": (-1, "truncate_prompt_tokens"),
}


def convert(prompt: object = "hello", **given: object) -> GenerateRequest:
    params = SamplingParams(**given)  # type: ignore[arg-type]
    return to_generate_request(prompt, params, add_special_tokens=True)  # type: ignore[arg-type]


def at(request: GenerateRequest, path: str) -> object:
    value: object = request
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("name", PLACES)
def test_each_field_has_its_place(name) -> None:
    value, path = PLACES[name]
    found = at(convert(**{name: value}), path)
    assert (dict(found) if isinstance(value, dict) else list(found) if isinstance(value, list) else found) == value
    # The value above is not what the message says anyway.
    parent, _, last = path.rpartition(".")
    message = at(convert(), parent) if parent else convert()
    is_optional = isinstance(value, int | float) and message.DESCRIPTOR.fields_by_name[last].has_presence
    assert at(convert(), path) != value or (is_optional and not message.HasField(last))


def test_no_field_is_forgotten() -> None:
    names = {field.name for field in fields(SamplingParams)} - {"structured_outputs", "output_kind"}
    assert names == set(PLACES)


def test_what_is_unset_stays_unset() -> None:
    request = convert()
    for part, names in (
        (request.sampling, ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")),
        (request.stop, ("max_tokens", "min_tokens")),
        (request.output, ("logprobs", "prompt_logprobs")),
    ):
        assert [name for name in names if part.HasField(name)] == []


def test_prompts_are_text_or_ids_and_ids_are_always_returned() -> None:
    assert convert("a text").text == "a text"
    request = convert((4, 5))
    assert list(request.token_ids.ids) == [4, 5]
    assert request.output.token_ids
    # Also an empty one is a prompt, which the frontend then refuses by its field.
    assert convert([]).WhichOneof("prompt") == "token_ids"


def test_one_stop_string_may_stand_alone() -> None:
    assert list(convert(stop="end").stop.stop) == ["end"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_tokens": -1}, "stop.max_tokens"),
        ({"n": "three"}, "sampling.n"),
        ({"top_k": 2**40}, "sampling.top_k"),
        ({"seed": 1.5}, "sampling.seed"),
        ({"bad_words": [5]}, "sampling.bad_words"),
        ({"stop": [None]}, "stop.stop"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": [5]}, "sampling.logit_bias"),
        ({"allowed_token_ids": 5}, "sampling.allowed_token_ids"),
        ({"temperature": [1.0]}, "sampling.temperature"),
        ({"prompt": [-1]}, "token_ids.ids"),
        ({"prompt": ["a"]}, "token_ids.ids"),
        ({"prompt": "\ud800"}, "text"),
    ],
)
def test_what_no_message_can_hold_is_refused_by_field(given, field) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        convert(**given)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json": "{}"}, "json_schema", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structural_tag": {"type": "structural_tag"}}, "structural_tag", '{"type": "structural_tag"}'),
    ],
)
def test_constraints(given, kind, value) -> None:
    message = convert(structured_outputs=StructuredOutputsParams(**given)).structured_output
    assert (message.WhichOneof("spec"), getattr(message, kind)) == (kind, value)


def test_constraints_without_a_text() -> None:
    message = convert(structured_outputs=StructuredOutputsParams(choice=["a", "b"])).structured_output
    assert list(message.choice.choices) == ["a", "b"]
    empty = convert(structured_outputs=StructuredOutputsParams(choice=[])).structured_output
    assert empty.WhichOneof("spec") == "choice"
    any_object = convert(structured_outputs=StructuredOutputsParams(json_object=True)).structured_output
    assert any_object.WhichOneof("spec") == "json_object"


@pytest.mark.parametrize(
    "given", [{}, {"regex": "a", "choice": ["a"]}, {"json": {"a": object()}}, {"json_object": False}]
)
def test_not_exactly_one_constraint_is_refused(given) -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        convert(structured_outputs=StructuredOutputsParams(**given))


def test_output_kinds_do_not_reach_the_message() -> None:
    assert convert(output_kind=RequestOutputKind.DELTA) == convert()
