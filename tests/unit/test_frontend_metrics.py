"""Which series of a frontend exist before anything has happened."""

from __future__ import annotations

import pytest

from frontend.metrics import FrontendMetrics
from frontend.processing_failures import Stage

DEATHS = "stepwire_frontend_engine_deaths_total"
OUTPUT_ERRORS = "stepwire_frontend_output_processing_errors_total"


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("reported", "STEP_FAILED"), ("reported", "OUT_OF_MEMORY"), ("reported", "UNSPECIFIED"), ("transport", "")],
)
def test_the_first_death_of_an_engine_is_a_change_of_a_series_that_is_there(kind: str, cause: str) -> None:
    metrics = FrontendMetrics()
    labels = {"engine_id": "engine", "kind": kind, "cause": cause}
    assert metrics.registry.get_sample_value(DEATHS, labels) is None
    metrics.engine_attached("engine")
    assert metrics.registry.get_sample_value(DEATHS, labels) == 0
    metrics.count_engine_death("engine", kind, cause)
    assert metrics.registry.get_sample_value(DEATHS, labels) == 1


def test_failures_of_output_are_counted_by_stage_from_the_start() -> None:
    metrics = FrontendMetrics()
    metrics.count_output_failure(Stage.LOGPROBS)
    found = [metrics.registry.get_sample_value(OUTPUT_ERRORS, {"stage": stage.value}) for stage in Stage]
    assert found == [0, 1]
