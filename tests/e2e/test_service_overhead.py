"""The benchmark of the service around an instant model keeps up with the product: it runs, and every token arrives."""

from __future__ import annotations

import pytest

from bench.service_overhead import measure_service

pytestmark = pytest.mark.slow

NUM_TOKENS = 96


def test_all_processes_are_measured(embedded_model_dir) -> None:
    # Steps that take their time, and enough of them, so that both requests run in some.
    cost = measure_service(2, step_ms=20.0, num_tokens=NUM_TOKENS, num_rounds=1, model_dir=embedded_model_dir)
    assert cost.tok_s > 0
    assert 0 < cost.tokens_a_message <= NUM_TOKENS
    assert cost.loop_us(2) > 0
    assert cost.waited_us >= 0
    assert cost.waited_p99_us >= 0
