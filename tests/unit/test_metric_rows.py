"""Rows, histograms of plain integers, and their second names."""

from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from stepwire.histogram import Histogram
from stepwire.metric_aliases import AliasedRegistry
from stepwire.metric_rows import counter, gauge, histogram
from stepwire.metrics import encoder_for
from stepwire.shared_histogram import SharedHistogram

LABELS = ("model_name", "engine_id")


def rendered(registry: object) -> dict[str, float]:
    """Values by name and labels as a scraper reads them."""
    text = generate_latest(registry).decode()  # type: ignore[arg-type]
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_value_belongs_to_the_bucket_whose_bound_it_equals() -> None:
    found = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        found.observe(value)
    assert found.counts == [2, 2, 1]
    assert found.cumulative() == [2, 4, 5]
    assert (found.count, found.total) == (5, 8)


def test_observations_of_several_threads_all_count() -> None:
    found = SharedHistogram((0.5,))
    threads = [threading.Thread(target=lambda: [found.observe(1) for _ in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.counts == [0, 20_000]
    assert found.total == 20_000


def test_an_alias_is_the_same_numbers_under_its_own_name_and_labels() -> None:
    row = counter("stepwire_x_tokens_total", "Tokens.", (*LABELS, "source"), "vllm:tokens_total")
    registry = CollectorRegistry()
    row.counter(registry).labels("m", "e", "cache").inc(3)
    found = rendered(AliasedRegistry(registry, [row]))
    own = "stepwire_x_tokens_total[('engine_id', 'e'), ('model_name', 'm'), ('source', 'cache')]"
    assert found == {own: 3, "vllm:tokens_total[('engine', 'e'), ('model_name', 'm'), ('source', 'cache')]": 3}


def test_an_alias_leaves_out_what_its_readers_do_not_know() -> None:
    info = gauge("stepwire_x_info", "1.", (*LABELS, "block_size"), "vllm:info", alias_drops=("model_name",))
    ends = counter(
        "stepwire_x_ends_total", "Ends.", ("reason",), "vllm:ends_total", alias_skips=frozenset({"rejected"})
    )
    registry = CollectorRegistry()
    info.gauge(registry).labels("m", "e", "16").set(1)
    live = ends.counter(registry)
    live.labels("stop").inc()
    live.labels("rejected").inc()
    found = rendered(AliasedRegistry(registry, [info, ends]))
    assert found["vllm:info[('block_size', '16'), ('engine', 'e')]"] == 1
    assert found["vllm:ends_total[('reason', 'stop')]"] == 1
    assert not [name for name in found if name.startswith("vllm:") and "rejected" in name]


@pytest.mark.parametrize("name", ["stepwire_x_seconds", "vllm:x_seconds"])
def test_a_histogram_has_every_bucket_from_the_start(name: str) -> None:
    row = histogram("stepwire_x_seconds", "Time.", (0.1, 1), ("engine_id",), "vllm:x_seconds")
    registry = CollectorRegistry()
    row.histograms(registry).labels("e").observe(0.5)
    text = generate_latest(AliasedRegistry(registry, [row])).decode()  # type: ignore[arg-type]
    [family] = [found for found in text_string_to_metric_families(text) if found.name == name]
    assert [(sample.labels.get("le"), sample.value) for sample in family.samples] == [
        ("0.1", 0),
        ("1.0", 1),
        ("+Inf", 1),
        (None, 1),
        (None, 0.5),
    ]


def test_a_trace_is_the_exemplar_of_its_bucket_in_openmetrics() -> None:
    row = histogram("stepwire_x_seconds", "Time.", (0.1, 1))
    registry = CollectorRegistry()
    found = row.histograms(registry).labels()
    found.observe_traced(0.5, "")
    found.observe_traced(0.7, "4bf92f")
    [family] = parse_openmetrics(generate_openmetrics(registry).decode())
    exemplars = {sample.labels["le"]: sample.exemplar for sample in family.samples if sample.name.endswith("_bucket")}
    assert exemplars["0.1"] is None
    assert exemplars["1.0"] is not None
    assert (exemplars["1.0"].labels, exemplars["1.0"].value) == ({"trace_id": "4bf92f"}, 0.7)
    assert found.count == 2


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "text/plain;version=0.0.4",
        "text/plain;version=1.0.0;escaping=underscores",
        "application/openmetrics-text;version=1.0.0",
        "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.6,text/plain;q=0.3",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3",
    ],
)
def test_the_names_of_aliases_keep_their_colon_in_every_format(accept: str) -> None:
    row = counter("stepwire_x_ends_total", "Ends.", ("engine_id",), "vllm:ends_total")
    registry = CollectorRegistry()
    row.counter(registry).labels("e").inc()
    encode, content_type = encoder_for(accept)
    lines = encode(AliasedRegistry(registry, [row])).decode().splitlines()
    assert 'vllm:ends_total{engine="e"} 1.0' in lines
    assert 'stepwire_x_ends_total{engine_id="e"} 1.0' in lines
    assert (lines[-1] == "# EOF") == content_type.startswith("application/openmetrics-text")
