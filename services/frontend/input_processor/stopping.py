"""The stop conditions of a request: checks, and the parts that go to the engine or stay with the stop matcher."""

from __future__ import annotations

from frontend.input_processor.field_checks import FieldChecks
from frontend.input_processor.model_facts import ModelFacts
from stepwire.v1 import common_pb2

# Each is searched for at every token, on the event loop: one caller must not slow down all others.
MAX_STOP_STRINGS = 256
# Output is held back, and replayed when it is resumed, as far as a stop string reaches.
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MIN_REPEATS = 2
# The engine compares every pattern length after every token, on its step loop.
MAX_PATTERN_TOKENS = 256


def check_stop(given: common_pb2.StopConditions, vocab_size: int, *, has_text: bool, checks: FieldChecks) -> None:
    """Everything that can be said before the prompt is tokenized."""
    stops = given.stop
    checks.strings("stop.stop", stops, max_count=MAX_STOP_STRINGS, max_chars=MAX_STOP_STRING_CHARS)
    checks.require(has_text or not stops, "stop.stop", "stop strings need text output, but output.text is false")
    checks.token_ids("stop.stop_token_ids", given.stop_token_ids, vocab_size, max_count=MAX_STOP_TOKEN_IDS)
    if given.HasField("max_tokens"):
        checks.require(given.max_tokens >= 1, "stop.max_tokens", f"{given.max_tokens} is less than 1")
        checks.require(
            given.min_tokens <= given.max_tokens,
            "stop.min_tokens",
            f"{given.min_tokens} is more than stop.max_tokens, {given.max_tokens}",
        )
    if given.HasField("repetition_detection"):
        _check_repetition(given.repetition_detection, checks)


def resolve_max_tokens(given: common_pb2.StopConditions, num_prompt_tokens: int, facts: ModelFacts) -> int:
    """What was asked for, cut to the room there is; all the room when nothing was asked for."""
    room = facts.room_for_output(num_prompt_tokens)
    return min(given.max_tokens, room) if given.HasField("max_tokens") else room


def resolve_min_tokens(given: common_pb2.StopConditions, max_tokens: int, checks: FieldChecks) -> int:
    """At most max_tokens: a limit that was cut to the room takes the lower one along."""
    if not given.HasField("max_tokens"):
        checks.require(
            given.min_tokens <= max_tokens,
            "stop.min_tokens",
            f"{given.min_tokens} is more than the {max_tokens} tokens for which there is room",
        )
    return min(given.min_tokens, max_tokens)


def _check_repetition(given: common_pb2.StopConditions.RepetitionDetection, checks: FieldChecks) -> None:
    if not given.max_pattern_tokens:
        return
    field = "stop.repetition_detection"
    checks.integer(f"{field}.max_pattern_tokens", given.max_pattern_tokens, 1, MAX_PATTERN_TOKENS)
    checks.integer(f"{field}.min_pattern_tokens", given.min_pattern_tokens, 1, given.max_pattern_tokens)
    checks.require(
        given.min_repeats >= MIN_REPEATS, f"{field}.min_repeats", f"{given.min_repeats} is less than {MIN_REPEATS}"
    )
