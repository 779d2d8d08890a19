"""Which engine gets the next request. Pure: the least loaded, and the next in turn among equals."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.engine_client.engine_facts import EngineLoad


def score(load: EngineLoad, num_local_adds: int) -> int:
    """Load of an engine; adds it has not reported yet count as waiting."""
    return 4 * (load.waiting + num_local_adds) + load.running


def pick(scores: Sequence[int], turn: int) -> int:
    """Index of the lowest score. `turn` rotates the start of the scan, so that equal engines share the work."""
    if not scores:
        raise ValueError("there is nothing to pick from")
    order = [(turn + offset) % len(scores) for offset in range(len(scores))]
    return min(order, key=lambda index: scores[index])
