"""A token from one uniform number: where the cumulative weight, in id order, exceeds it.

Owner: the busy-loop thread. Pure functions; the rows of a batch do not touch each other.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

# Weights that are summed up first, so that only sums are walked over the whole vocabulary.
_GROUP = 64


def invert_cdf(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first token where the cumulative weight exceeds its share of the sum; float64 [R, V], [R] -> [R].

    Never a token of weight 0: such tokens are left out explicitly, because a parallel sum may wobble in its last
    digit. A number so near 1 that rounding leaves no token takes the last possible one.
    """
    cumulative = weights.cumsum(dim=-1)
    possible = weights > 0
    beyond = (cumulative > (numbers * cumulative[:, -1])[:, None]) & possible
    # Of equal maxima, argmax takes the first.
    first = beyond.to(torch.uint8).argmax(dim=-1)
    last_possible = possible.shape[-1] - 1 - possible.flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.where(beyond.any(dim=-1), first, last_possible)


def group_sums(weights: torch.Tensor) -> torch.Tensor:
    """weights float32 [R, V] -> sums of neighbours, float64 [R, ceil(V / 64)]."""
    return _grouped(weights).sum(dim=-1).double()


def invert_wide_cdf(weights: torch.Tensor, sums: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The same over a whole vocabulary: first the group, by the `sums` of `group_sums`, then the token in it."""
    group = invert_cdf(sums, numbers)[:, None]
    cumulative = sums.cumsum(dim=-1)
    mass = sums.gather(1, group)
    passed = cumulative.gather(1, group) - mass
    # What is left of the number, as a share of the group.
    rest = ((numbers[:, None] * cumulative[:, -1:] - passed) / mass).clamp(0, 1)
    members = _grouped(weights).gather(1, group[:, :, None].expand(-1, -1, _GROUP))[:, 0]
    token_ids = group[:, 0] * _GROUP + invert_cdf(members.double(), rest[:, 0])
    # The last possible of weights that are no numbers may be one of the last group's missing members.
    return token_ids.clamp(max=weights.shape[-1] - 1)


def _grouped(weights: torch.Tensor) -> torch.Tensor:
    """[R, V] -> [R, ceil(V / 64), 64]"""
    missing = -weights.shape[-1] % _GROUP
    return (pad(weights, (0, missing)) if missing else weights).reshape(len(weights), -1, _GROUP)
