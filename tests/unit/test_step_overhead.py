"""The benchmark of the step loop keeps up with the executor's contract: it runs, and sees every step."""

from __future__ import annotations

from bench.step_overhead import NUM_OUTPUT_TOKENS, step_gaps


def test_every_decode_step_is_measured() -> None:
    gaps = step_gaps(2, num_waiting=3)
    # So many steps but the last one; between them lies one gap less, and the first one is left out.
    assert len(gaps) == NUM_OUTPUT_TOKENS - 1 - 2
    assert min(gaps) > 0
