"""Every metric that is served: a change of a name, a label or a bucket is a diff that somebody has to read."""

from __future__ import annotations

from pathlib import Path

from metrics_page import TABLES, golden_text, with_tables

from stepwire.metric_rows import MetricKind

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "metrics.md"


def test_names_types_labels_and_buckets_are_the_reviewed_ones(check_golden):
    check_golden(HERE / "metrics.txt", golden_text())


def test_the_documentation_has_the_tables_of_the_code(check_golden):
    check_golden(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))


def test_names_follow_the_rules():
    for service, rows in TABLES.items():
        names = [row.name for row in rows] + [row.alias for row in rows if row.alias]
        assert len(names) == len(set(names)), "a name is used twice"
        for row in rows:
            prefix = "vllm:" if service == "mirror" else f"stepwire_{service.replace(' ', '_')}_"
            assert row.name.startswith(prefix)
            assert row.name.endswith("_total") == (row.kind is MetricKind.COUNTER), row.name
            if row.kind is MetricKind.COUNTER and row.alias:
                assert row.alias.endswith("_total"), row.alias
            assert bool(row.buckets) == (row.kind is MetricKind.HISTOGRAM), row.name
            assert list(row.buckets) == sorted(set(row.buckets)), row.name


def test_the_mirror_repeats_rows_of_the_engine():
    of_engine = {row.alias: row for row in TABLES["engine core"] if row.alias}
    for row in TABLES["mirror"]:
        assert of_engine[row.name].kind is row.kind
