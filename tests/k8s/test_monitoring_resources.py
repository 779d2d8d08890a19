"""Rules and dashboards reach a cluster as they are in deploy/."""

from __future__ import annotations

import json
import subprocess
import sys

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


def test_every_dashboard_is_a_config_map_that_the_side_car_finds():
    maps = of_kind(render(Build("overlays/cpu", ("grafana-dashboard",))), "ConfigMap")
    found = [item for item in maps if item["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    texts = [text for item in found for text in item["data"].values()]
    files = [json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "deploy" / "grafana").glob("*.json")]
    assert sorted(json.loads(text)["uid"] for text in texts) == sorted(dashboard["uid"] for dashboard in files)
    # `kubectl apply` keeps a copy in an annotation, which may have 256 KiB.
    assert all(len(json.dumps(item)) < 250_000 for item in found)
