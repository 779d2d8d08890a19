"""Whoever is woken by an alert finds its section, and every section has an alert."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
RULES = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text(encoding="utf-8"))
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
PAGE = "docs/operations/runbook.md"
SECTIONS = dict(re.findall(r"(?ms)^## (\S+)\n(.*?)(?=^## |\Z)", (ROOT / PAGE).read_text(encoding="utf-8")))


def test_each_alert_has_a_section_and_each_section_an_alert():
    assert set(SECTIONS) == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
def test_an_alert_links_to_its_section(rule: dict):
    assert rule["annotations"]["runbook_url"] == f"{PAGE}#{rule['alert'].lower()}"


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_says_what_it_means_where_to_look_and_what_to_do(name: str):
    assert re.findall(r"(?m)^\*\*(Means|Look|Do)\*\*", SECTIONS[name]) == ["Means", "Look", "Do"]
