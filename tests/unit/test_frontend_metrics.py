"""Which series of a frontend exist before anything has happened."""

from __future__ import annotations

import pytest
from prometheus_client.samples import Sample

from frontend.metrics import FrontendMetrics
from frontend.processing_failures import Stage

DEATHS = "stepwire_frontend_engine_deaths_total"
REJECTED = "stepwire_frontend_requests_rejected_total"
IN_FLIGHT = "stepwire_frontend_requests_in_flight"
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


def test_a_class_has_series_from_the_moment_that_the_operator_names_it() -> None:
    metrics = FrontendMetrics()
    metrics.client_classes.name(["gold"])
    assert metrics.registry.get_sample_value(REJECTED, {"reason": "QUEUE_FULL", "client_class": "gold"}) == 0


def test_a_class_that_nobody_has_named_is_no_label() -> None:
    metrics = FrontendMetrics()
    metrics.client_classes.name(["gold"])
    for claimed in ("", "platinum", "iron"):
        metrics.client_classes.of(claimed).rejected["QUEUE_FULL"].inc()
    assert metrics.registry.get_sample_value(REJECTED, {"reason": "QUEUE_FULL", "client_class": "other"}) == 3
    served = {sample.labels["client_class"] for sample in samples_of(metrics, IN_FLIGHT)}
    assert served == {"gold", "other"}


def test_a_class_that_has_left_the_file_keeps_its_counts() -> None:
    metrics = FrontendMetrics()
    metrics.client_classes.name(["gold"])
    metrics.client_classes.of("gold").in_flight.inc()
    metrics.client_classes.name([])
    assert metrics.registry.get_sample_value(IN_FLIGHT, {"client_class": "gold"}) == 1


def samples_of(metrics: FrontendMetrics, name: str) -> list[Sample]:
    return [sample for family in metrics.registry.collect() for sample in family.samples if sample.name == name]


def test_failures_of_output_are_counted_by_stage_from_the_start() -> None:
    metrics = FrontendMetrics()
    metrics.count_output_failure(Stage.LOGPROBS)
    found = [metrics.registry.get_sample_value(OUTPUT_ERRORS, {"stage": stage.value}) for stage in Stage]
    assert found == [0, 1, 0]
