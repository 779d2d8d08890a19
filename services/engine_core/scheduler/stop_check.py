"""What one more output token means: whether the request is over. The order of the checks is part of the contract."""

from __future__ import annotations

from engine_core.scheduler.request import RepetitionDetection, Request, RequestStatus


def append_tokens(request: Request, token_ids: list[int], max_model_len: int) -> tuple[list[int], RequestStatus | None]:
    """Take in sampled tokens. Returns those that count, and the finished status that the last of them brought.

    FINISHED_ERROR: the grammar refuses the next one.
    """
    for index, token_id in enumerate(token_ids):
        if request.grammar is not None and not request.grammar.accept(token_id):
            return token_ids[:index], RequestStatus.FINISHED_ERROR
        request.output_token_ids.append(token_id)
        status = check_stop(request, max_model_len)
        if status is not None:
            return token_ids[: index + 1], status
    return token_ids, None


def check_stop(request: Request, max_model_len: int) -> RequestStatus | None:
    """The finished status the newest output token brings, or None; sets `stop_token_id` when that ended it."""
    # Nothing can follow the end of a grammar, whatever min_tokens and ignore_eos say.
    if request.grammar is not None and request.grammar.is_terminated:
        return RequestStatus.FINISHED_STOPPED
    stop = request.stop
    num_output = len(request.output_token_ids)
    if num_output < stop.min_tokens:
        return None
    token_id = request.output_token_ids[-1]
    if token_id in stop.eos_token_ids and not stop.ignore_eos:
        return RequestStatus.FINISHED_STOPPED
    if token_id in stop.stop_token_ids:
        request.stop_token_id = token_id
        return RequestStatus.FINISHED_STOPPED
    if num_output >= stop.max_tokens or len(request.prompt_token_ids) + num_output >= max_model_len:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    if stop.repetition is not None and repeats(request.output_token_ids, stop.repetition):
        return RequestStatus.FINISHED_REPETITION
    return None


def repeats(token_ids: list[int], detection: RepetitionDetection) -> bool:
    """Whether the tail is one pattern, `min_repeats` times in a row."""
    for length in range(max(1, detection.min_pattern_tokens), detection.max_pattern_tokens + 1):
        span = length * detection.min_repeats
        if span > len(token_ids):
            return False
        # A tail of period `length` equals itself moved by `length`; most lengths fail at the last token already.
        if token_ids[-1] == token_ids[-1 - length] and token_ids[-span:-length] == token_ids[length - span :]:
            return True
    return False
