"""A prompt and SamplingParams as the message of the public API, which the frontend's input processor checks. Pure.

A value that the message can not even hold (a negative count, a word for a number) is refused here, by its field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from google.protobuf.message import Message

from offline.sampling_params import SamplingParams, StructuredOutputsParams
from stepwire.errors import InvalidRequestError
from stepwire.v1.common_pb2 import StructuredOutput
from stepwire.v1.generation_service_pb2 import GenerateRequest

Prompt = str | Sequence[int]

# Names that are the same on both sides.
_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "logit_bias", "allowed_token_ids", "bad_words",
)  # fmt: skip
_STOP = ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")
_OUTPUT = ("logprobs", "prompt_logprobs", "logprob_token_ids", "skip_special_tokens")


def to_generate_request(prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool) -> GenerateRequest:
    """Raises InvalidRequestError for what has no place in the message."""
    request = GenerateRequest(add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        _put(request, "text", prompt)
    else:
        _put(request.token_ids, "ids", prompt, field="token_ids.ids")
    for part, message, names in (
        ("sampling", request.sampling, _SAMPLING),
        ("stop", request.stop, _STOP),
        ("output", request.output, _OUTPUT),
    ):
        for name in names:
            _put(message, name, getattr(params, name), field=f"{part}.{name}")
    _put(request.stop, "stop", [params.stop] if isinstance(params.stop, str) else params.stop, field="stop.stop")
    _put(request.stop, "include_stop_in_output", params.include_stop_str_in_output)
    _put(request.output, "text", params.detokenize, field="output.text")
    request.output.token_ids = True
    _put(request, "truncate_prompt_tokens", params.truncate_prompt_tokens)
    if params.structured_outputs is not None:
        _put_constraint(request.structured_output, params.structured_outputs)
    return request


def _put(message: Message, name: str, value: object, *, field: str = "") -> None:
    """Set a field; None leaves it unset."""
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Iterable) and not isinstance(value, str):
            getattr(message, name).extend(value)
        elif value is not None:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError.of_field(field or name, f"{type(value).__name__} is not accepted: {error}") from error


def _put_constraint(message: StructuredOutput, given: StructuredOutputsParams) -> None:
    kinds = {
        "json_schema": _as_json(given.json),
        "json_object": given.json_object or None,
        "regex": given.regex,
        "grammar": given.grammar,
        "choice": given.choice,
        "structural_tag": _as_json(given.structural_tag),
    }
    given_kinds = [kind for kind, value in kinds.items() if value is not None]
    if len(given_kinds) != 1:
        names = ", ".join(given_kinds) or "none"
        raise InvalidRequestError.of_field("structured_outputs", f"exactly one kind must be set, not {names}")
    [kind] = given_kinds
    match kind:
        case "json_object":
            message.json_object.SetInParent()
        case "choice":
            # Also when it is empty, which the frontend refuses.
            message.choice.SetInParent()
            _put(message.choice, "choices", given.choice, field="structured_output.choice")
        case _:
            _put(message, kind, kinds[kind], field=f"structured_output.{kind}")


def _as_json(value: str | Mapping[str, object] | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError.of_field("structured_outputs", f"it can not be written as JSON: {error}") from error
