"""The benchmark of two tenants keeps up with the product: services, quiet tenant and flood run, and give its rows."""

from __future__ import annotations

import pytest

from bench import service_overhead, two_tenants

pytestmark = pytest.mark.slow


def test_a_quiet_tenant_is_measured_alone_and_beside_a_flood(
    embedded_model_dir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service_overhead, "MODEL", embedded_model_dir)
    monkeypatch.setattr(two_tenants, "STEP_MS", 5)
    # The ratio of so few says nothing.
    alone, beside, ratio = two_tenants.measure(num_quiet=8, num_flood=2 * two_tenants.NUM_PLACES)
    assert alone.value > 0
    assert beside.value > 0
    assert ratio.value == pytest.approx(beside.value / alone.value)
    assert "of that alone" in capsys.readouterr().err
