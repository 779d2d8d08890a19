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
    """What can be said without tokenizing. Lengths come first: no more ids are looked at than the context holds."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        checks.add("prompt", "neither text nor token_ids is set")
    if _check_truncation(request, facts, checks):
        if kind == "text":
            _check_text(request, facts, longest_token, checks)
        elif kind == "token_ids":
            _check_token_ids(request, facts, checks)
    resumed = request.resume_output_token_ids.ids
    if len(resumed) < facts.max_model_len:
        checks.token_ids("resume_output_token_ids.ids", resumed, facts.vocab_size)
    else:
        _add_too_long("resume_output_token_ids", f"{len(resumed)} tokens", facts, checks)


def token_ids_to_keep(request: generation_service_pb2.GenerateRequest, facts: ModelFacts) -> list[int]:
    """The ids of a token prompt; with truncation its end alone, whatever its length. Empty for a text."""
    num_kept = _num_kept(request, facts)
    token_ids = request.token_ids.ids
    return list(token_ids) if num_kept is None else token_ids[-num_kept:]


def text_to_encode(request: generation_service_pb2.GenerateRequest, facts: ModelFacts, longest_token: int) -> str:
    """The text of a text prompt; with truncation only so much of its end as the kept tokens can cover.

    Without that cut a text of any length would be encoded, and hold one of the few threads for as long; an encoding
    that runs can not be cancelled. A cut inside a word only changes tokens next to it, far from those that are kept.
    """
    num_kept = _num_kept(request, facts)
    return request.text if num_kept is None else request.text[-num_kept * longest_token :]


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
    num_kept = _num_kept(request, facts)
    return prompt_token_ids if num_kept is None else prompt_token_ids[-num_kept:]


def check_tokens(
    request: generation_service_pb2.GenerateRequest,
    prompt_token_ids: Sequence[int],
    facts: ModelFacts,
    checks: FieldChecks,
) -> None:
    """The prompt as the engine would see it: not empty, known to the model, and with room for what comes after it."""
    field = request.WhichOneof("prompt") or "prompt"
    # A normalizer may leave nothing of a text.
    checks.require(bool(prompt_token_ids), field, "the prompt has no tokens")
    # A tokenizer may know more ids than the model has rows; such an id would end the engine, not the request.
    checks.token_ids(field, prompt_token_ids, facts.vocab_size)
    num_resumed = len(request.resume_output_token_ids.ids)
    if len(prompt_token_ids) + num_resumed > facts.longest_prompt:
        resumed = f" and {num_resumed} resumed output tokens" if num_resumed else ""
        _add_too_long(field, f"a prompt of {len(prompt_token_ids)} tokens{resumed}", facts, checks)


def _num_kept(request: generation_service_pb2.GenerateRequest, facts: ModelFacts) -> int | None:
    """Most tokens that truncation leaves, at least 1; None when the caller asked for none."""
    if not request.HasField("truncate_prompt_tokens"):
        return None
    if request.truncate_prompt_tokens == KEEP_ALL_THAT_FITS:
        return max(1, facts.longest_prompt - len(request.resume_output_token_ids.ids))
    return request.truncate_prompt_tokens


def _check_truncation(request: generation_service_pb2.GenerateRequest, facts: ModelFacts, checks: FieldChecks) -> bool:
    num_kept = _num_kept(request, facts)
    return num_kept is None or checks.require(
        1 <= num_kept <= facts.max_model_len,
        "truncate_prompt_tokens",
        f"{num_kept} is neither -1 nor in 1..{facts.max_model_len}",
    )


def _check_text(
    request: generation_service_pb2.GenerateRequest, facts: ModelFacts, longest_token: int, checks: FieldChecks
) -> None:
    num_chars = len(request.text)
    checks.require(num_chars > 0, "text", "the prompt is empty")
    # No token covers more than the longest one, so such a text cannot fit, whatever it is.
    is_absurd = num_chars > facts.max_model_len * longest_token
    if is_absurd and not request.HasField("truncate_prompt_tokens"):
        _add_too_long("text", f"a text of {num_chars} characters", facts, checks)


def _check_token_ids(request: generation_service_pb2.GenerateRequest, facts: ModelFacts, checks: FieldChecks) -> None:
    count = len(request.token_ids.ids)
    if count > facts.longest_prompt and not request.HasField("truncate_prompt_tokens"):
        _add_too_long("token_ids", f"a prompt of {count} tokens", facts, checks)
        return
    checks.require(count > 0, "token_ids.ids", "the prompt is empty")
    kept = token_ids_to_keep(request, facts)
    checks.token_ids("token_ids.ids", kept, facts.vocab_size, first_index=count - len(kept))


def _add_too_long(field: str, what: str, facts: ModelFacts, checks: FieldChecks) -> None:
    of_them = ", one of them for the output" if facts.min_output_tokens else ""
    limit = f"the context holds {facts.max_model_len} tokens{of_them}"
    checks.add(field, f"{what} does not fit: {limit}", reason="CONTEXT_LENGTH_EXCEEDED")
