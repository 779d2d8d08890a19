"""How many tokens of prompts a step of decodes should take along on a CPU, measured when the model is loaded.

A CPU computes a token of a prompt in a time that counts beside a step of decodes: it has no idle units to use. How long
depends on the machine, the model and the number type: a few rows are bound by memory, more of them by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

NUM_DECODES = 8
# A step with the part takes at most this many times as long as one without: some of the 2.5 that is promised for the
# slowest of a hundred tokens goes to attention over what the prompt has computed already.
MAX_RATIO = 1.6
PARTS = (16, 24, 32, 48, 64, 96, 128)
# The shortest of them counts: whatever else runs on the machine only makes a step longer.
_NUM_ROUNDS = 3


def measure_prefill_part(
    run_step: Callable[[list[int]], object], max_query_len: int, clock: Callable[[], float]
) -> int:
    """The largest of PARTS that keeps the ratio, the smallest one at least; no longer than `max_query_len`.

    `run_step` computes sequences of the given lengths without a past, and returns when it is done.
    """
    decodes = [1] * NUM_DECODES
    longest = MAX_RATIO * _shortest(run_step, decodes, clock)
    found = min(PARTS[0], max_query_len)
    for part in PARTS:
        if part > max_query_len or _shortest(run_step, [*decodes, part], clock) > longest:
            break
        found = part
    return found


def _shortest(run_step: Callable[[list[int]], object], query_lens: list[int], clock: Callable[[], float]) -> float:
    """Seconds."""
    # The first one pays for memory that the others find.
    run_step(query_lens)
    durations = []
    for _ in range(_NUM_ROUNDS):
        began = clock()
        run_step(query_lens)
        durations.append(clock() - began)
    return min(durations)
