"""The benchmark of the step loop keeps up with the executor's contract: it runs, and sees every step."""

from __future__ import annotations

import runpy
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "step_overhead.py"


def test_every_decode_step_is_measured() -> None:
    bench = runpy.run_path(str(BENCH))
    gaps = bench["measure"](2, num_waiting=3)
    # So many steps but the last one; between them lies one gap less, and the first one is left out.
    assert len(gaps) == bench["NUM_OUTPUT_TOKENS"] - 1 - 2
    assert min(gaps) > 0
