"""What is asked of Prometheus about an alert that does not fire."""

from __future__ import annotations

import pytest

from rule_sides import sides_of


@pytest.mark.parametrize(
    ("expr", "sides"),
    [
        ("rate(a[5m]) > 3", ["rate(a[5m])"]),
        ("a > 2 and sum by (b) (c) == 0", ["a", "sum by (b) (c)"]),
        ("(a > 1 or (b unless on (x) c)) unless d == 1", ["a", "b", "c", "d"]),
        ("absent(a) or absent(b)", ["a", "b"]),
        ("a - time() < 7 * 86400", ["a - time()", "7 * 86400"]),
        ("a / (b > 0)", ["a / (b > 0)"]),
    ],
)
def test_an_alert_is_asked_for_each_side_of_its_comparisons(expr: str, sides: list[str]) -> None:
    assert sides_of(expr) == sides
