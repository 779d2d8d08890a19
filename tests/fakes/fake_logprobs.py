"""Log-probabilities of no model: rows that say which token and which position they are about."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

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
