"""The sampling part of a request: ranges, the model's defaults, and what greedy switches off.

The result is complete except for bad words, which have to be tokenized, and the seed offset of further choices.
"""

from __future__ import annotations

import math
import secrets

from frontend.generation_config import GenerationDefaults
from frontend.input_processor.field_checks import FieldChecks
from stepwire.engine.v1 import engine_core_pb2
from stepwire.v1 import common_pb2

MAX_N = 16384
MAX_BAD_WORDS = 1024
# All of them are tokenized, twice each.
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_TEMPERATURE = 2.0
# Closer to 0 the division of the logits overflows; greedy is what such callers mean to be near to.
MIN_TEMPERATURE = 0.01
MAX_LOGIT_BIAS = 100.0
MAX_INT32 = 2**31 - 1
SEED_BITS = 63


def read_sampling(
    given: common_pb2.SamplingParams, defaults: GenerationDefaults, vocab_size: int, checks: FieldChecks
) -> engine_core_pb2.EngineSamplingParams:
    """Resolve every field; what is wrong goes to `checks`, and the result is then not to be used."""
    resolved = engine_core_pb2.EngineSamplingParams(
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        seed=resolve_seed(given),
    )
    is_greedy = _read_temperature(given, defaults, checks, resolved)
    _read_truncation(given, defaults, vocab_size, checks, resolved)
    _read_penalties(given, defaults, checks, resolved)
    _read_logit_bias(given, vocab_size, checks, resolved)
    _read_allowed_token_ids(given, vocab_size, checks, resolved)
    checks.strings("sampling.bad_words", given.bad_words, max_count=MAX_BAD_WORDS, max_chars=MAX_BAD_WORD_CHARS)
    _check_n(given, checks, is_greedy=is_greedy)
    if is_greedy:
        resolved.top_p, resolved.top_k, resolved.min_p = 1.0, 0, 0.0
    return resolved


def num_choices(given: common_pb2.SamplingParams) -> int:
    return given.n if given.HasField("n") else 1


def resolve_seed(given: common_pb2.SamplingParams) -> int:
    """The caller's seed, or a fresh one; -1 asks for a fresh one."""
    return given.seed if given.HasField("seed") and given.seed != -1 else secrets.randbits(SEED_BITS)


def child_seed(seed: int, choice: int) -> int:
    """Seed of choice i: seed + i in the 64-bit ring, so that the largest seed has neighbours too."""
    return (seed + choice + 2**63) % 2**64 - 2**63


def _read_temperature(
    given: common_pb2.SamplingParams,
    defaults: GenerationDefaults,
    checks: FieldChecks,
    resolved: engine_core_pb2.EngineSamplingParams,
) -> bool:
    """Returns whether sampling is greedy, which a wrong temperature is not."""
    value = given.temperature if given.HasField("temperature") else defaults.temperature
    if not checks.number("sampling.temperature", value, 0.0, MAX_TEMPERATURE):
        return False
    resolved.temperature = max(value, MIN_TEMPERATURE) if value > 0 else 0.0
    return resolved.temperature == 0


def _read_truncation(
    given: common_pb2.SamplingParams,
    defaults: GenerationDefaults,
    vocab_size: int,
    checks: FieldChecks,
    resolved: engine_core_pb2.EngineSamplingParams,
) -> None:
    top_p = given.top_p if given.HasField("top_p") else defaults.top_p
    if checks.number("sampling.top_p", top_p, 0.0, 1.0, is_low_open=True):
        resolved.top_p = top_p
    top_k = given.top_k if given.HasField("top_k") else defaults.top_k
    if checks.integer("sampling.top_k", top_k, -1, MAX_INT32):
        # Both 0 and -1 are off; more than the vocabulary restricts nothing.
        resolved.top_k = top_k if 0 < top_k < vocab_size else 0
    min_p = given.min_p if given.HasField("min_p") else defaults.min_p
    if checks.number("sampling.min_p", min_p, 0.0, 1.0):
        resolved.min_p = min_p


def _read_penalties(
    given: common_pb2.SamplingParams,
    defaults: GenerationDefaults,
    checks: FieldChecks,
    resolved: engine_core_pb2.EngineSamplingParams,
) -> None:
    checks.number("sampling.presence_penalty", given.presence_penalty, -2.0, 2.0)
    checks.number("sampling.frequency_penalty", given.frequency_penalty, -2.0, 2.0)
    repetition = given.repetition_penalty if given.HasField("repetition_penalty") else defaults.repetition_penalty
    if checks.number("sampling.repetition_penalty", repetition, 0.0, math.inf, is_low_open=True):
        resolved.repetition_penalty = repetition


def _read_logit_bias(
    given: common_pb2.SamplingParams,
    vocab_size: int,
    checks: FieldChecks,
    resolved: engine_core_pb2.EngineSamplingParams,
) -> None:
    field, count = "sampling.logit_bias", len(given.logit_bias)
    if count > MAX_LOGIT_BIAS_ENTRIES:
        checks.add(field, f"{count} entries, at most {MAX_LOGIT_BIAS_ENTRIES} are allowed")
        return
    for token_id, bias in sorted(given.logit_bias.items()):
        if token_id >= vocab_size:
            checks.add(f"{field}[{token_id}]", f"token id {token_id} is outside 0..{vocab_size - 1}")
        if not math.isfinite(bias):
            checks.add(f"{field}[{token_id}]", f"{bias:g} is not a finite number")
        resolved.logit_bias_token_ids.append(token_id)
        resolved.logit_bias_values.append(max(-MAX_LOGIT_BIAS, min(bias, MAX_LOGIT_BIAS)))


def _read_allowed_token_ids(
    given: common_pb2.SamplingParams,
    vocab_size: int,
    checks: FieldChecks,
    resolved: engine_core_pb2.EngineSamplingParams,
) -> None:
    token_ids = given.allowed_token_ids
    if checks.token_ids("sampling.allowed_token_ids", token_ids, vocab_size, max_count=vocab_size):
        resolved.allowed_token_ids.extend(sorted(set(token_ids)))


def _check_n(given: common_pb2.SamplingParams, checks: FieldChecks, *, is_greedy: bool) -> None:
    n = num_choices(given)
    if checks.integer("sampling.n", n, 1, MAX_N) and is_greedy:
        checks.require(n == 1, "sampling.n", f"{n} choices with greedy sampling would all be equal; the limit is 1")
