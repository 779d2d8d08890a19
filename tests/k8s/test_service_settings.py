"""The services start with what each overlay and component gives them, and autoscalers ask for metrics that exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import trustme
import yaml

from engine_core.config import EngineSettings
from frontend.config import FrontendSettings
from manifests import BUILDS, K8S, Build, containers_of, environment_of, of_kind, render, workloads
from stepwire.settings import Settings

SERVICES: dict[str, type[Settings]] = {"frontend": FrontendSettings, "engine-core": EngineSettings}
# Variables of others that the services or their libraries read.
FOREIGN = {
    "HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "HF_TOKEN_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
    "POD_NAME", "NAMESPACE", "NODE_NAME", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_RESOURCE_ATTRIBUTES",
}  # fmt: skip
MOUNTS = "/etc/stepwire/"
METRICS = (K8S.parent / "docs" / "metrics.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what Secrets would have put below /etc/stepwire."""
    directory = tmp_path_factory.mktemp("mounted")
    (directory / "tls").mkdir()
    authority = trustme.CA()
    certificate = authority.issue_cert("stepwire-engine-core")
    authority.cert_pem.write_to_path(str(directory / "tls" / "ca.crt"))
    certificate.private_key_pem.write_to_path(str(directory / "tls" / "tls.key"))
    certificate.cert_chain_pems[0].write_to_path(str(directory / "tls" / "tls.crt"))
    (directory / "api-keys").mkdir()
    (directory / "api-keys" / "tokens.toml").write_text('[tokens.alice]\ntoken = "0123456789abcdef"\n')
    return directory


def environments(build: Build) -> list[tuple[str, dict[str, str]]]:
    """Service and variables of each of stepwire's containers."""
    items = render(build)
    containers = [container for workload in workloads(items) for container in containers_of(workload)]
    return [(item["name"], environment_of(items, item)) for item in containers if item["name"] in SERVICES]


def accepted(environment: dict[str, str], service: str, mounted: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings of a process with this environment; a mistake ends the test with SystemExit.

    What `--check-config` does in a process, without the seconds that it takes to start one for each.
    """
    for name in [name for name in os.environ if name.startswith("STEPWIRE_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        if name.startswith("STEPWIRE_"):
            monkeypatch.setenv(name, value.replace(MOUNTS, f"{mounted}/"))
    return SERVICES[service].from_command_line([])


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_the_services_accept_every_setting(build: Build, mounted: Path, monkeypatch: pytest.MonkeyPatch):
    found = environments(build)
    assert {service for service, _ in found} == set(SERVICES)
    for service, environment in found:
        accepted(environment, service, mounted, monkeypatch)
        assert {name for name in environment if not name.startswith("STEPWIRE_")} <= FOREIGN


def test_a_misspelt_setting_is_refused(mounted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    [environment] = [variables for service, variables in environments(Build(".")) if service == "frontend"]
    with pytest.raises(SystemExit):
        accepted(environment | {"STEPWIRE_DRAIN_TIMEOUT": "5"}, "frontend", mounted, monkeypatch)
    assert "STEPWIRE_DRAIN_TIMEOUT" in capsys.readouterr().err


def test_mtls_leaves_nothing_open(mounted: Path, monkeypatch: pytest.MonkeyPatch):
    for service, environment in environments(Build("overlays/ha")):
        settings = accepted(environment, service, mounted, monkeypatch)
        assert isinstance(settings, FrontendSettings | EngineSettings)
        assert not settings.insecure
        assert settings.tls is not None


def test_probes_of_a_service_with_tls_do_not_ask_its_grpc_port():
    for workload in workloads(render(Build("overlays/ha"))):
        for container in containers_of(workload):
            assert all("grpc" not in probe for name, probe in container.items() if name.endswith("Probe"))


def test_autoscalers_ask_for_metrics_that_exist():
    pods = of_kind(render(Build("overlays/cpu", ("hpa",))), "HorizontalPodAutoscaler")
    asked = {
        metric["pods"]["metric"]["name"] for item in pods for metric in item["spec"]["metrics"] if "pods" in metric
    }
    adapter = yaml.safe_load((K8S / "components" / "hpa" / "adapter-rules.yaml").read_text())["rules"]["custom"]
    assert asked == {rule["seriesQuery"].partition("{")[0] for rule in adapter}
    [scaled] = of_kind(render(Build("overlays/cpu", ("keda",))), "ScaledObject")
    queries = " ".join(trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])
    asked |= set(re.findall(r"stepwire_\w+", queries))
    assert all(f"| `{name}` | gauge |" in METRICS for name in asked)
