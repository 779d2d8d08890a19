"""The prompt of a request as token ids: cheap refusals first, then encoding in a thread, then truncation and length."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.input_processor.field_checks import FieldChecks
from frontend.input_processor.model_facts import ModelFacts
from frontend.tokenizer import Tokenizer
from stepwire.v1 import generation_service_pb2

KEEP_ALL_THAT_FITS = -1


def check_prompt(
    request: generation_service_pb2.GenerateRequest, facts: ModelFacts, longest_token: int, checks: FieldChecks
) -> None:
    """What can be said without tokenizing, and before anything is done for each token."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        checks.add("prompt", "neither text nor token_ids is set")
    elif kind == "text":
        _check_text(request, facts, longest_token, checks)
    else:
        _check_token_ids(request, facts, checks)
    if request.HasField("truncate_prompt_tokens"):
        num_kept = request.truncate_prompt_tokens
        checks.require(
            num_kept == KEEP_ALL_THAT_FITS or 1 <= num_kept <= facts.max_model_len,
            "truncate_prompt_tokens",
            f"{num_kept} is neither -1 nor in 1..{facts.max_model_len}",
        )
    resumed = request.resume_output_token_ids.ids
    if len(resumed) < facts.max_model_len:
        checks.token_ids("resume_output_token_ids.ids", resumed, facts.vocab_size)
    else:
        _add_too_long("resume_output_token_ids", f"{len(resumed)} tokens", facts, checks)


def encode_prompt(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, bad_words: Sequence[str]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Ids of the prompt and of each variant of each bad word. Takes long; for a thread."""
    prompt_token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []
    variants: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        # A word looks different to the model at the start of a text and inside a sentence.
        bare = word.lstrip(" ") or word
        for variant in (bare, f" {bare}"):
            variants[tuple(tokenizer.encode(variant, add_special_tokens=False))] = None
    variants.pop((), None)
    return prompt_token_ids, list(variants)


def truncate_prompt(
    request: generation_service_pb2.GenerateRequest, prompt_token_ids: list[int], facts: ModelFacts
) -> list[int]:
    """The last k tokens when the caller asked for that."""
    if not request.HasField("truncate_prompt_tokens"):
        return prompt_token_ids
    num_kept = request.truncate_prompt_tokens
    if num_kept == KEEP_ALL_THAT_FITS:
        num_kept = max(1, facts.max_model_len - len(request.resume_output_token_ids.ids) - 1)
    return prompt_token_ids[-num_kept:]


def check_tokens(
    request: generation_service_pb2.GenerateRequest,
    prompt_token_ids: Sequence[int],
    facts: ModelFacts,
    checks: FieldChecks,
) -> None:
    """The prompt as the engine would see it: not empty, known to the model, and with room for one token after it."""
    field = request.WhichOneof("prompt") or "prompt"
    # A normalizer may leave nothing of a text.
    checks.require(bool(prompt_token_ids), field, "the prompt has no tokens")
    # A tokenizer may know more ids than the model has rows; such an id would end the engine, not the request.
    checks.token_ids(field, prompt_token_ids, facts.vocab_size)
    num_resumed = len(request.resume_output_token_ids.ids)
    if len(prompt_token_ids) + num_resumed >= facts.max_model_len:
        resumed = f" and {num_resumed} resumed output tokens" if num_resumed else ""
        _add_too_long(field, f"a prompt of {len(prompt_token_ids)} tokens{resumed}", facts, checks)


def _check_text(
    request: generation_service_pb2.GenerateRequest, facts: ModelFacts, longest_token: int, checks: FieldChecks
) -> None:
    checks.require(bool(request.text), "text", "the prompt is empty")
    # No token covers more than the longest one, so such a text cannot fit, whatever it is.
    is_absurd = len(request.text) > facts.max_model_len * longest_token
    if is_absurd and not request.HasField("truncate_prompt_tokens"):
        _add_too_long("text", f"a text of {len(request.text)} characters", facts, checks)


def _check_token_ids(request: generation_service_pb2.GenerateRequest, facts: ModelFacts, checks: FieldChecks) -> None:
    token_ids = request.token_ids.ids
    if len(token_ids) >= facts.max_model_len and not request.HasField("truncate_prompt_tokens"):
        _add_too_long("token_ids", f"a prompt of {len(token_ids)} tokens", facts, checks)
        return
    checks.require(bool(token_ids), "token_ids.ids", "the prompt is empty")
    checks.token_ids("token_ids.ids", token_ids, facts.vocab_size)


def _add_too_long(field: str, what: str, facts: ModelFacts, checks: FieldChecks) -> None:
    limit = f"the context holds {facts.max_model_len} tokens, one of them for the output"
    checks.add(field, f"{what} does not fit: {limit}", reason="CONTEXT_LENGTH_EXCEEDED")
