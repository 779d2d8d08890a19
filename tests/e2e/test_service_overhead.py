"""The benchmark of the service around an instant model keeps up with the product: it runs, and every token arrives."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "service_overhead.py"

pytestmark = pytest.mark.slow


def test_all_processes_are_measured(embedded_model_dir) -> None:
    bench = runpy.run_path(str(BENCH))
    cost = bench["measure_service"](2, num_tokens=8, num_rounds=1, model_dir=embedded_model_dir)
    assert cost.tokens_per_s > 0
    assert 0 < cost.tokens_per_message <= 8
    assert cost.loop_us > 0
