"""Whether a request keeps the promises of the wire contract. Pure; runs in the input threads.

Frontends validate for their callers; this protects the engine from a broken frontend. An id outside the vocabulary,
for example, would fail the forward pass and with it every other request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine_core.resolved_config import ResolvedConfig
from engine_core.scheduler.pooling import EMBED, PoolingParams
from engine_core.scheduler.request import MAX_PATTERN_TOKENS, NO_LOGPROBS, Request
from engine_core.scheduler.request_error import RequestError
from stepwire.packed_logprobs import MAX_CHOSEN_TOKEN_IDS, MAX_PROMPT_ENTRIES, WHOLE_VOCABULARY, num_entries


def protocol_error(request: Request, config: ResolvedConfig) -> RequestError | None:
    """The first broken promise, naming field, value and limit; None = the request may be queued."""
    if request.pooling is not None and config.pooling is None:
        return RequestError("UNSUPPORTED_FEATURE", "pooling: this engine does not pool; --pooling is off")
    for message in _broken_promises(request, config):
        return RequestError("FIELD_INVALID", message)
    return None


def _broken_promises(request: Request, config: ResolvedConfig) -> Iterator[str]:
    stop, sampling = request.stop, request.sampling
    if not request.prompt_token_ids:
        yield "prompt_token_ids: is empty"
    if request.pooling is not None:
        yield from _broken_pooling(request, request.pooling, config)
    elif stop.max_tokens <= request.num_resumed_tokens:
        yield f"max_tokens: {stop.max_tokens} leaves nothing after {request.num_resumed_tokens} resumed tokens"
    if request.max_num_tokens > config.max_model_len:
        yield f"max_tokens: prompt and max_tokens are {request.max_num_tokens}; the limit is {config.max_model_len}"
    if stop.min_tokens > stop.max_tokens:
        yield f"min_tokens: {stop.min_tokens} is above max_tokens {stop.max_tokens}"
    if not (0 <= sampling.temperature < math.inf and 0 < sampling.top_p <= 1 and sampling.repetition_penalty > 0):
        yield (
            f"sampling: temperature {sampling.temperature}, top_p {sampling.top_p} and repetition_penalty "
            f"{sampling.repetition_penalty} must be at least 0 and finite, in (0, 1] and above 0; "
            "defaults are not applied"
        )
    if stop.repetition is not None and stop.repetition.min_repeats < 2:
        yield f"repetition_detection.min_repeats: {stop.repetition.min_repeats} is below 2"
    if stop.repetition is not None and stop.repetition.max_pattern_tokens > MAX_PATTERN_TOKENS:
        yield (
            f"repetition_detection.max_pattern_tokens: {stop.repetition.max_pattern_tokens} is above "
            f"{MAX_PATTERN_TOKENS}"
        )
    if request.grammar_spec is not None and request.grammar_spec.kind not in config.structured_output_kinds:
        yield f"structured_output: {request.grammar_spec.kind} is not supported by this engine"
    if any(not bad_word for bad_word in sampling.bad_words):
        yield "sampling.bad_words: one has no tokens"
    yield from _broken_logprobs(request, config)
    largest = max(_token_ids(request), default=0)
    if largest >= config.model_info.vocab_size:
        yield f"token id {largest} is outside the vocabulary of {config.model_info.vocab_size}"


def _broken_pooling(request: Request, pooling: PoolingParams, config: ResolvedConfig) -> Iterator[str]:
    if pooling.task != EMBED:
        yield f"pooling.task: {pooling.task!r} is none of this engine's; it is {EMBED!r}"
    limit = config.model_info.hidden_size
    if pooling.num_dimensions is not None and not 1 <= pooling.num_dimensions <= limit:
        yield f"pooling.dimensions: {pooling.num_dimensions} is outside 1..{limit}"
    if request.stop.max_tokens or request.output_token_ids:
        num_resumed = len(request.output_token_ids)
        yield f"max_tokens: {request.stop.max_tokens} and {num_resumed} resumed tokens with pooling, which has neither"
    if request.grammar_spec is not None or request.logprobs != NO_LOGPROBS:
        yield "pooling: excludes structured_output, logprobs and prompt_logprobs, which are about tokens"


def _broken_logprobs(request: Request, config: ResolvedConfig) -> Iterator[str]:
    asked, vocab_size = request.logprobs, config.model_info.vocab_size
    limit = vocab_size if config.max_logprobs == WHOLE_VOCABULARY else config.max_logprobs
    for field, value in (("logprobs", asked.num_output), ("prompt_logprobs", asked.num_prompt)):
        if value is not None and not 0 <= num_entries(value, vocab_size) <= limit:
            yield f"{field}: {value} asks for {num_entries(value, vocab_size)}, at most {limit}"
    if len(asked.chosen_token_ids) > MAX_CHOSEN_TOKEN_IDS:
        yield f"logprob_token_ids: {len(asked.chosen_token_ids)} ids, at most {MAX_CHOSEN_TOKEN_IDS}"
    if asked.num_prompt is not None:
        # What one request may put into the outbox of its session, which it shares with all others.
        num_all = request.num_prompt_tokens * (1 + num_entries(asked.num_prompt, vocab_size))
        if num_all > MAX_PROMPT_ENTRIES:
            yield f"prompt_logprobs: {num_all} entries over the prompt, at most {MAX_PROMPT_ENTRIES}"


def _token_ids(request: Request) -> Iterator[int]:
    """Every id of the request that indexes the vocabulary."""
    yield from request.prompt_token_ids
    yield from request.output_token_ids
    yield from request.stop.stop_token_ids
    yield from request.stop.eos_token_ids
    yield from request.sampling.allowed_token_ids
    yield from request.logprobs.chosen_token_ids
    for token_id, _ in request.sampling.logit_bias:
        yield token_id
    for bad_word in request.sampling.bad_words:
        yield from bad_word
