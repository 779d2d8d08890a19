"""The benchmark of the step loop keeps up with the executor's contract: it runs, and sees every step."""

from __future__ import annotations

import runpy
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "step_overhead.py"


def test_every_decode_step_is_measured() -> None:
    bench = runpy.run_path(str(BENCH))
    gaps = bench["measure"](2)
    # Between so many steps lies one gap less; the first and the last two are left out.
    assert len(gaps) == bench["NUM_OUTPUT_TOKENS"] - 1 - 3
    assert min(gaps) > 0
