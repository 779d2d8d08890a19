"""What a worker without a model adds to a step for requests that ask for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.scheduler.output import PromptLogprobs
from engine_core.scheduler.request import LogprobsParams
from fakes.fake_logprobs import fake_rows
from stepwire.packed_logprobs import PackedLogprobs


def fake_sampled(params: LogprobsParams, token_id: int, position: int) -> PackedLogprobs | None:
    """What a worker adds to a sampled token."""
    if not params.has_output:
        return None
    return fake_rows([token_id], position, params.num_output or 0, params.chosen_token_ids)


def fake_prompt(params: LogprobsParams, prompt: Sequence[int], start: int, end: int) -> PromptLogprobs | None:
    """What a worker that computes the positions [start, end) adds for the prompt tokens after them."""
    end = min(end, len(prompt) - 1)
    if params.num_prompt is None or start >= end:
        return None
    return PromptLogprobs(start, fake_rows(prompt[start + 1 : end + 1], start + 1, params.num_prompt))
