"""The benchmark of the step loop keeps up with the executor's contract: it runs, and sees every step."""

from __future__ import annotations

import pytest

from bench.step_overhead import NUM_OUTPUT_TOKENS, step_gaps
from engine_core.output_queue import Outbox


def test_every_decode_step_is_measured() -> None:
    gaps = step_gaps(2, num_waiting=3)
    # So many steps but the last one; between them lies one gap less, and the first one is left out.
    assert len(gaps) == NUM_OUTPUT_TOKENS - 1 - 2
    assert min(gaps) > 0


def test_outputs_are_taken_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    append = Outbox._append

    def noted(self: Outbox, item: object) -> None:
        nonlocal longest
        append(self, item)  # type: ignore[arg-type]
        longest = max(longest, len(self))

    monkeypatch.setattr(Outbox, "_append", noted)
    step_gaps(2)
    # A step's outputs, and statistics or a shutdown beside them.
    assert 1 <= longest <= 4
