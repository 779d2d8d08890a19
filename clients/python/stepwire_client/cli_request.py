"""Option values of `stepwire generate` -> GenerateRequest. Pure; a value that cannot be read is a usage error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from stepwire.v1 import common_pb2, generation_service_pb2
from stepwire_client import cli_structured_output

# Options whose name is the proto field's name.
_SAMPLING_FIELDS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
]
_STOP_FIELDS = ["max_tokens", "min_tokens", "ignore_eos"]
_OUTPUT_FIELDS = [
    "token_ids",
    "logprobs",
    "prompt_logprobs",
    "timings",
    "skip_special_tokens",
    "min_chunk_tokens",
    "max_chunk_delay_ms",
]
_REQUEST_FIELDS = [
    "request_id",
    "model",
    "priority",
    "queue_timeout_ms",
    "truncate_prompt_tokens",
    "add_special_tokens",
]

# Options that only make sense for many prompts, and those that only make sense for one.
_OF_FILES = {"output": "--output", "concurrency": "--concurrency"}
_OF_ONE_PROMPT = {
    "prompt": "PROMPT",
    "prompt_token_ids": "--prompt-token-ids",
    "request_id": "--request-id (a .jsonl line may hold a request_id of its own)",
}

Options = Mapping[str, Any]


def check_combination(options: Options) -> None:
    """Refuse options of which one would be ignored."""
    if options["file"] is None:
        _refuse(options, _OF_FILES, "without --file")
    else:
        _refuse(options, _OF_ONE_PROMPT, "with --file")
    if options["prompt"] is not None and options["prompt_token_ids"] is not None:
        raise typer.BadParameter("PROMPT and --prompt-token-ids are two prompts: give one")


def _refuse(options: Options, names: Mapping[str, str], when: str) -> None:
    for name, shown in names.items():
        if options[name] not in (None, ""):
            raise typer.BadParameter(f"{shown} has no meaning {when}")


def build(options: Options) -> generation_service_pb2.GenerateRequest:
    """The request without its prompt. `options` are the parameters of the command by name."""
    try:
        request = generation_service_pb2.GenerateRequest(
            sampling=_sampling(options),
            stop=_stop(options),
            output=_output(options),
            **_given(options, _REQUEST_FIELDS),
        )
        constraint = cli_structured_output.build(options)
        if constraint is not None:
            request.structured_output.CopyFrom(constraint)
        if options["cache_salt"] or options["bypass_prefix_cache"]:
            request.kv.cache_salt = options["cache_salt"]
            request.kv.bypass_prefix_cache = options["bypass_prefix_cache"]
        if options["resume_token_ids"]:
            request.resume_output_token_ids.ids.extend(parse_ids("--resume-token-ids", options["resume_token_ids"]))
        return request
    except ValueError as error:
        # Protobuf refuses what does not fit a field's type: a negative count, a seed beyond 64 bits.
        raise typer.BadParameter(str(error)) from error


def set_prompt(request: generation_service_pb2.GenerateRequest, text: str | None, token_ids: str | None) -> None:
    """Give the request its prompt: token ids or text."""
    if token_ids is not None:
        request.token_ids.ids.extend(parse_ids("--prompt-token-ids", token_ids))
    else:
        request.text = text or ""


def parse_ids(flag: str, value: str) -> Sequence[int]:
    """Comma-separated token ids."""
    try:
        return [_parse_id(part) for part in value.split(",") if part.strip()]
    except ValueError as error:
        raise typer.BadParameter(f"{flag}: expected token ids like 1,2,3, got {value!r}") from error


def _parse_id(text: str) -> int:
    token_id = int(text)
    if not 0 <= token_id < 2**32:
        raise ValueError(f"{token_id} is no token id")
    return token_id


def _given(options: Options, names: Sequence[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if options[name] is not None}


def _sampling(options: Options) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        **_given(options, _SAMPLING_FIELDS),
        logit_bias=dict(_parse_bias(item) for item in options["logit_bias"] or ()),
        allowed_token_ids=options["allowed_token_id"] or (),
        bad_words=options["bad_word"] or (),
    )


def _stop(options: Options) -> common_pb2.StopConditions:
    stop = common_pb2.StopConditions(
        **_given(options, _STOP_FIELDS),
        stop=options["stop"] or (),
        stop_token_ids=options["stop_token_id"] or (),
        include_stop_in_output=options["include_stop"],
    )
    if options["repetition_detection"]:
        stop.repetition_detection.CopyFrom(_parse_repetition(options["repetition_detection"]))
    return stop


def _output(options: Options) -> common_pb2.OutputOptions:
    return common_pb2.OutputOptions(
        **_given(options, _OUTPUT_FIELDS),
        logprob_token_ids=options["logprob_token_id"] or (),
        echo_prompt=options["echo"],
    )


def _parse_bias(item: str) -> tuple[int, float]:
    token_id, _, bias = item.partition("=")
    try:
        return _parse_id(token_id), float(bias)
    except ValueError as error:
        raise typer.BadParameter(f"--logit-bias: expected ID=BIAS like 42=-5, got {item!r}") from error


def _parse_repetition(value: str) -> common_pb2.StopConditions.RepetitionDetection:
    parts = value.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"--repetition-detection: expected MAX:MIN:REPEATS like 8:1:4, got {value!r}")
    longest, shortest, repeats = map(int, parts)
    return common_pb2.StopConditions.RepetitionDetection(
        max_pattern_tokens=longest, min_pattern_tokens=shortest, min_repeats=repeats
    )
