"""What one request adds to the metrics, under times that the test gives."""

from __future__ import annotations

from frontend.generation_events import Admitted, ChoiceDelta, ChoiceFinished, FinishReason
from frontend.metrics import FrontendMetrics, ModelMetrics
from frontend.request_observer import RequestObserver
from stepwire.histogram import Histogram


def delta(choice: int, num_tokens: int = 1) -> ChoiceDelta:
    return ChoiceDelta(choice, "x", (), num_tokens)


def finished(choice: int, num_tokens: int) -> ChoiceFinished:
    return ChoiceFinished(choice, FinishReason.STOP, None, num_tokens)


def of_model() -> ModelMetrics:
    return FrontendMetrics().of_model("model", "engine")


def found(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, histogram.total


def test_a_request_with_two_choices() -> None:
    metrics = of_model()
    observer = RequestObserver(metrics, 10, num_choices=2, num_prompt_tokens=7, max_tokens=50)
    observer.observe([Admitted()], 11)
    observer.observe([delta(0), delta(1)], 12)
    observer.observe([delta(0, 2)], 14)
    observer.observe([delta(1), finished(0, 3), finished(1, 2)], 16)
    observer.close("error", 17, num_merged=4)
    assert found(metrics.admission) == (1, 1)
    assert found(metrics.time_to_first_token) == (1, 2)
    assert found(metrics.inter_token_latency) == (2, 2 + 4)
    # Three tokens came behind the first ones, in 2 and 4 seconds.
    assert found(metrics.time_per_token) == (1, (2 + 4) / 3)
    assert found(metrics.duration) == (1, 7)
    assert found(metrics.prompt_tokens) == (1, 7)
    assert found(metrics.max_tokens) == (1, 50)
    assert found(metrics.generation_tokens) == (1, 5)
    assert found(metrics.max_generation_tokens) == (1, 3)
    assert found(metrics.choices) == (1, 2)
    assert ends(metrics) == {"stop": 2}
    assert metrics.deltas_merged._value.get() == 4


def test_choices_without_an_end_of_their_own_end_with_the_request() -> None:
    metrics = of_model()
    observer = RequestObserver(metrics, 10, num_choices=3, num_prompt_tokens=7, max_tokens=50)
    observer.observe([delta(0), finished(0, 1)], 12)
    observer.close("abort", 13)
    assert ends(metrics) == {"stop": 1, "abort": 2}
    assert found(metrics.time_per_token) == (0, 0)


def test_a_stop_token_that_nobody_sees_is_a_first_token_too() -> None:
    metrics = of_model()
    observer = RequestObserver(metrics, 10, num_choices=1, num_prompt_tokens=7, max_tokens=50)
    observer.observe([finished(0, 1)], 12)
    observer.close("error", 13)
    assert found(metrics.time_to_first_token) == (1, 2)


def test_a_trace_is_the_exemplar_of_its_latencies() -> None:
    metrics = of_model()
    observer = RequestObserver(metrics, 10, num_choices=1, num_prompt_tokens=7, max_tokens=50, trace_id="4bf92f")
    observer.observe([delta(0), finished(0, 1)], 12)
    observer.close("error", 13)
    for histogram in (metrics.time_to_first_token, metrics.duration):
        assert [traced.trace_id for traced in histogram.traced.values()] == ["4bf92f"]


def ends(metrics: ModelMetrics) -> dict[str, float]:
    counts = {reason: live._value.get() for reason, live in metrics.finished.items()}
    return {reason: number for reason, number in counts.items() if number}
