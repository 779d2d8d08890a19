"""The garbage collector of an engine under load (engine-semantics.md §14, row 21)."""

from __future__ import annotations

import re
import sys

import pytest

from running_engine import engine_request, running_engine

NUM_WAVES = 12
WAVE = 1000


@pytest.mark.slow
@pytest.mark.regression(21)
def test_no_full_collection_while_serving(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests that live long enough to grow old, in numbers that would make the collector look at all of them."""
    with running_engine("--max-num-seqs", "512", module="fakes.gc_recording_engine_process") as engine:
        stream = engine.connect()
        handles = iter(range(1, NUM_WAVES * WAVE + 1))
        waves = [[next(handles) for _ in range(WAVE)] for _ in range(NUM_WAVES)]
        for wave, before in zip(waves, [[], *waves], strict=False):
            stream.add(*(engine_request(handle, [10] * 3, 12) for handle in wave))
            # The next wave comes before this one has ended: the engine is never idle.
            stream.until_finished(*before)
        stream.until_finished(*waves[-1])
        engine.terminate()
        stream.rest()
        assert engine.wait() == 0
        found = re.findall(r"generation (\d): (\d+) collections, the longest ([\d.]+) ms", "".join(engine.log))
    with capsys.disabled():
        sys.stdout.write(f"\ncollections (generation, number, longest pause in ms): {found}\n")
    young, middle, old = (int(number) for _, number, _ in found)
    assert young > 100
    assert middle > 10
    assert old == 0
