"""Rules and dashboards reach a cluster as they are in deploy/."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from manifests import K8S, Build, of_kind, render

ROOT = K8S.parent


def test_the_rules_of_the_cluster_are_those_of_the_file():
    [rule] = of_kind(render(Build("overlays/cpu", ("prometheus-rules",))), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text(encoding="utf-8"))


def test_the_resource_is_what_make_gen_rules_writes():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gen-rules"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def generate(directory: Path, runbook_base: str) -> subprocess.CompletedProcess[str]:
    """`make gen-rules` in a copy of what it reads."""
    for name in ("scripts/gen-rules", "deploy/prometheus/rules.yaml"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    command = [sys.executable, str(directory / "scripts" / "gen-rules")]
    environment = {**os.environ, "RUNBOOK_BASE": runbook_base}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_alerts_link_to_where_the_runbook_is_published(tmp_path: Path):
    assert generate(tmp_path, "https://docs.example/stepwire/").returncode == 0
    resource = yaml.safe_load((tmp_path / "deploy" / "prometheus" / "prometheus-rule.yaml").read_text())
    alerts = [rule for group in resource["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    for rule in alerts:
        page = "https://docs.example/stepwire/docs/operations/runbook.md"
        assert rule["annotations"]["runbook_url"] == f"{page}#{rule['alert'].lower()}"


def test_a_place_of_the_runbook_that_is_no_address_is_refused(tmp_path: Path):
    done = generate(tmp_path, "docs.example")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "RUNBOOK_BASE: docs.example does not begin with https://" in done.stderr


def test_every_dashboard_is_a_config_map_that_the_side_car_finds():
    maps = of_kind(render(Build("overlays/cpu", ("grafana-dashboard",))), "ConfigMap")
    found = [item for item in maps if item["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    texts = [text for item in found for text in item["data"].values()]
    files = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "deploy" / "grafana").glob("*.json")]
    assert sorted(json.loads(text)["uid"] for text in texts) == sorted(dashboard["uid"] for dashboard in files)
    # `kubectl apply` keeps a copy in an annotation, which may have 256 KiB.
    assert all(len(json.dumps(item)) < 250_000 for item in found)
