"""vLLM's GenerateRequest as stepwire's own, so that one input processor checks and completes both. Pure.

A plain scalar of that protocol can not say "unset": its zero means off, as it does for vLLM.
"""

from __future__ import annotations

from typing import Any

from stepwire.errors import FieldViolation, InvalidRequestError
from stepwire.v1 import common_pb2
from stepwire.v1 import generation_service_pb2 as own_pb

_TEXT_CONSTRAINTS = ("json_schema", "regex", "grammar", "structural_tag")
_UNSUPPORTED = ("mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json")


def to_generate_request(request: Any) -> own_pb.GenerateRequest:
    """Raises InvalidRequestError for what the own message can not hold."""
    _refuse_unsupported(request)
    given = request.sampling_params
    message = own_pb.GenerateRequest(
        sampling=_sampling(given),
        stop=_stop(given),
        output=_output(given),
        structured_output=_structured_output(given),
    )
    if given.HasField("truncate_prompt_tokens"):
        message.truncate_prompt_tokens = given.truncate_prompt_tokens
    match request.WhichOneof("input"):
        case "tokenized":
            message.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            message.text = request.text
        case _:
            raise InvalidRequestError.of_field("input", "neither tokenized nor text is set")
    return message


def _refuse_unsupported(request: Any) -> None:
    fields = [field for field in _UNSUPPORTED if request.HasField(field)]
    if request.extra_mm_inputs:
        fields.append("extra_mm_inputs")
    if fields:
        raise InvalidRequestError(
            f"not supported by this server: {', '.join(fields)}",
            reason="UNSUPPORTED_FEATURE",
            violations=tuple(FieldViolation(field, "not supported by this server") for field in fields),
        )


def _sampling(given: Any) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams(
        top_p=given.top_p or 1.0,
        # Beyond 31 bits it restricts nothing.
        top_k=min(given.top_k, 2**31 - 1),
        min_p=given.min_p,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty or 1.0,
        n=given.n or 1,
    )
    if given.HasField("temperature"):
        sampling.temperature = given.temperature
    if given.HasField("seed"):
        sampling.seed = given.seed
    for token_id, bias in given.logit_bias.items():
        if token_id < 0:
            raise InvalidRequestError.of_field("sampling_params.logit_bias", f"token id {token_id} is less than 0")
        sampling.logit_bias[token_id] = bias
    return sampling


def _stop(given: Any) -> common_pb2.StopConditions:
    stop = common_pb2.StopConditions(
        min_tokens=given.min_tokens,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        # All ids travel: whoever turns them into text cuts the stop himself, and must see it for that.
        include_stop_in_output=True,
    )
    if given.HasField("max_tokens"):
        stop.max_tokens = given.max_tokens
    return stop


def _output(given: Any) -> common_pb2.OutputOptions:
    """Ids; text is made only to look for stop strings in it."""
    output = common_pb2.OutputOptions(
        text=bool(given.stop), token_ids=True, skip_special_tokens=given.skip_special_tokens
    )
    if given.HasField("logprobs"):
        output.logprobs = given.logprobs
    if given.HasField("prompt_logprobs"):
        output.prompt_logprobs = given.prompt_logprobs
    return output


def _structured_output(given: Any) -> common_pb2.StructuredOutput | None:
    kind = given.WhichOneof("constraint")
    if kind in _TEXT_CONSTRAINTS:
        return common_pb2.StructuredOutput(**{kind: getattr(given, kind)})
    if kind == "choice":
        return common_pb2.StructuredOutput(choice=common_pb2.StructuredOutput.Choice(choices=given.choice.choices))
    if kind == "json_object" and given.json_object:
        return common_pb2.StructuredOutput(json_object=common_pb2.StructuredOutput.JsonObject())
    return None
