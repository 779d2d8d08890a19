"""Log-probabilities of no model: rows that say which token and which position they are about."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine_core.scheduler.output import PromptLogprobs
from engine_core.scheduler.request import LogprobsParams
from stepwire.packed_logprobs import PackedLogprobs


def fake_rows(
    token_ids: Sequence[int], first_position: int, num_top: int, chosen: Sequence[int] = ()
) -> PackedLogprobs:
    """A row for each token: log-probability -position for it, and less and less for the others; its rank is 2."""
    ids, values = array("I"), array("f")
    for position, token_id in enumerate(token_ids, start=first_position):
        others = [*(token_id + 1 + place for place in range(num_top)), *chosen]
        ids.extend([token_id, *others])
        values.extend([-float(position), *(-position - (place + 1) / 8 for place in range(len(others)))])
    width = 1 + num_top + len(chosen)
    return PackedLogprobs(width, ids.tobytes(), values.tobytes(), array("I", [2] * len(token_ids)).tobytes())


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
