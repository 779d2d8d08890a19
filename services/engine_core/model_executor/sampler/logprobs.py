"""Raw log-probabilities, as packed rows: what the model said before any rule, penalty or temperature.

Owner: the busy-loop thread. Costs nothing to rows that do not ask. Logits of a whole prompt chunk would be larger than
everything else in a step, so they are made and dropped in slices of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_core.scheduler.output import PromptLogprobs
from engine_core.scheduler.request import LogprobsParams, RequestKey
from stepwire.packed_logprobs import PackedLogprobs, num_entries

# Large enough to use the output matrix well, small beside what the sampler needs for a batch.
_SLICE_ROWS = 64


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A sampled row whose request asked; `index` into the logits of the step."""

    index: int
    key: RequestKey
    params: LogprobsParams


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The prompt tokens behind the positions [start, start + N) of one request, which this step computes."""

    key: RequestKey
    start: int
    num_top: int
    # Of the positions, as indices into the flattened batch, [N].
    logits_indices: np.ndarray
    # The prompt token after each position, [N].
    token_ids: np.ndarray


def raw_logprobs(logits: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
    """logits [S, V] -> log-probabilities float32 [R, V] of the rows: a copy, because the sampler changes its logits."""
    return logits[[row.index for row in rows]].float().log_softmax(dim=-1)


def pack_sampled(
    logprobs: torch.Tensor, rows: Sequence[SampledRow], token_ids: Sequence[int]
) -> dict[RequestKey, PackedLogprobs]:
    """logprobs [R, V] from `raw_logprobs`, the tokens [S] of the step -> a row for each request that asked."""
    packed: dict[RequestKey, PackedLogprobs] = {}
    for params in {row.params for row in rows}:
        # All rows that ask for the same are handled at once.
        members = [member for member, row in enumerate(rows) if row.params == params]
        own = torch.tensor([token_ids[rows[member].index] for member in members], device=logprobs.device)
        num_top = num_entries(params.num_output or 0, logprobs.shape[-1])
        group = _pack(logprobs[members], own, num_top, params.chosen_token_ids)
        packed.update((rows[member].key, group.rows(place, place + 1)) for place, member in enumerate(members))
    return packed


def pack_prompt(rows: PromptRows, compute_logits: Callable[[np.ndarray], torch.Tensor]) -> PromptLogprobs:
    """`compute_logits` gives the logits [n, V] of n indices into the flattened batch."""
    parts: list[PackedLogprobs] = []
    for start in range(0, len(rows.token_ids), _SLICE_ROWS):
        part = slice(start, start + _SLICE_ROWS)
        logprobs = compute_logits(rows.logits_indices[part]).float().log_softmax(dim=-1)
        own = torch.from_numpy(rows.token_ids[part]).to(logprobs.device)
        parts.append(_pack(logprobs, own, rows.num_top, ()))
    return PromptLogprobs(rows.start, PackedLogprobs.join(parts))


def _pack(logprobs: torch.Tensor, own: torch.Tensor, num_top: int, chosen: tuple[int, ...]) -> PackedLogprobs:
    """logprobs float32 [R, V], own token of each row [R]. An entry row: own, the most likely first, chosen."""
    own_logprobs = logprobs.gather(1, own[:, None])
    ids, values = [own[:, None]], [own_logprobs]
    if num_top:
        top = logprobs.topk(num_top, dim=-1)
        ids.append(top.indices)
        values.append(top.values)
    if chosen:
        columns = torch.tensor(chosen, device=logprobs.device)
        ids.append(columns.expand(len(own), -1))
        values.append(logprobs[:, columns])
    # Equal values share a rank.
    ranks = (logprobs > own_logprobs).sum(dim=-1) + 1
    return PackedLogprobs(
        width=1 + num_top + len(chosen),
        token_ids=_bytes(torch.cat(ids, dim=1), "<u4"),
        logprobs=_bytes(torch.cat(values, dim=1), "<f4"),
        ranks=_bytes(ranks, "<u4"),
    )


def _bytes(values: torch.Tensor, dtype: str) -> bytes:
    return values.cpu().numpy().astype(dtype).tobytes()
