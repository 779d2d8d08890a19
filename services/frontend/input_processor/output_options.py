"""The output part of a request: what the answer contains and how it is cut into messages."""

from __future__ import annotations

from frontend.input_processor.field_checks import FieldChecks
from frontend.input_processor.model_facts import ModelFacts
from frontend.input_processor.processed_request import OutputSettings
from stepwire.engine.v1 import engine_core_pb2
from stepwire.errors import InvalidRequestError
from stepwire.packed_logprobs import MAX_CHOSEN_TOKEN_IDS, MAX_PROMPT_ENTRIES, WHOLE_VOCABULARY, num_entries
from stepwire.v1 import common_pb2


def read_output(given: common_pb2.OutputOptions, facts: ModelFacts, checks: FieldChecks) -> OutputSettings:
    """Resolve the options."""
    chosen = given.logprob_token_ids
    checks.token_ids("output.logprob_token_ids", chosen, facts.vocab_size, max_count=MAX_CHOSEN_TOKEN_IDS)
    return OutputSettings(
        text=given.text if given.HasField("text") else True,
        token_ids=given.token_ids,
        skip_special_tokens=given.skip_special_tokens if given.HasField("skip_special_tokens") else True,
        min_chunk_tokens=given.min_chunk_tokens,
        max_chunk_delay_s=given.max_chunk_delay_ms / 1000,
        timings=given.timings,
        echo_prompt=given.echo_prompt,
        num_logprobs=_read_logprobs(
            "output.logprobs", given.logprobs if given.HasField("logprobs") else None, facts, checks
        ),
        logprob_token_ids=tuple(sorted(set(chosen))),
        num_prompt_logprobs=_read_logprobs(
            "output.prompt_logprobs",
            given.prompt_logprobs if given.HasField("prompt_logprobs") else None,
            facts,
            checks,
        ),
    )


def check_prompt_logprobs(output: OutputSettings, num_prompt_tokens: int) -> None:
    """The prompt's log-probabilities travel in one message. Raises InvalidRequestError when they are too many."""
    if output.num_prompt_logprobs is not None:
        count = num_prompt_tokens * (1 + output.num_prompt_logprobs)
        if count > MAX_PROMPT_ENTRIES:
            raise InvalidRequestError.of_field(
                "output.prompt_logprobs",
                f"{count} entries for {num_prompt_tokens} prompt tokens, at most {MAX_PROMPT_ENTRIES} are allowed",
            )


def add_logprobs(output: OutputSettings, message: engine_core_pb2.EngineCoreRequest) -> None:
    """The part of the options that is the engine's."""
    if output.num_logprobs is not None:
        message.logprobs = output.num_logprobs
    if output.num_prompt_logprobs is not None:
        message.prompt_logprobs = output.num_prompt_logprobs
    message.logprob_token_ids.extend(output.logprob_token_ids)


def _read_logprobs(field: str, value: int | None, facts: ModelFacts, checks: FieldChecks) -> int | None:
    """How many of each position, besides its own token: never more than there are; None = no log-probabilities."""
    if value is None or not checks.require(value >= WHOLE_VOCABULARY, field, f"{value} is neither -1 nor at least 0"):
        return None
    asked = num_entries(value, facts.vocab_size)
    limit = facts.vocab_size if facts.max_logprobs == WHOLE_VOCABULARY else facts.max_logprobs
    checks.require(asked <= limit, field, f"{value} asks for {asked}, at most {limit}")
    return asked
