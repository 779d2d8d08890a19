"""The output part of a request: what the answer contains and how it is cut into messages."""

from __future__ import annotations

from frontend.input_processor.field_checks import FieldChecks
from frontend.input_processor.model_facts import ModelFacts
from frontend.input_processor.processed_request import OutputSettings
from stepwire.v1 import common_pb2

WHOLE_VOCABULARY = -1


def read_output(given: common_pb2.OutputOptions, facts: ModelFacts, checks: FieldChecks) -> OutputSettings:
    """Resolve the options. Log-probabilities are checked here as well, so that a wrong value is named as such."""
    for field in ("logprobs", "prompt_logprobs"):
        if given.HasField(field):
            _check_logprobs(f"output.{field}", getattr(given, field), facts, checks)
    ids = given.logprob_token_ids
    checks.token_ids("output.logprob_token_ids", ids, facts.vocab_size, max_count=facts.vocab_size)
    return OutputSettings(
        text=given.text if given.HasField("text") else True,
        token_ids=given.token_ids,
        skip_special_tokens=given.skip_special_tokens if given.HasField("skip_special_tokens") else True,
        min_chunk_tokens=given.min_chunk_tokens,
        max_chunk_delay_s=given.max_chunk_delay_ms / 1000,
        timings=given.timings,
        echo_prompt=given.echo_prompt,
    )


def _check_logprobs(field: str, value: int, facts: ModelFacts, checks: FieldChecks) -> None:
    is_known = checks.require(value >= WHOLE_VOCABULARY, field, f"{value} is neither -1 nor at least 0")
    asked = facts.vocab_size if value == WHOLE_VOCABULARY else value
    if is_known:
        checks.require(asked <= facts.max_logprobs, field, f"{value} asks for {asked}, at most {facts.max_logprobs}")
