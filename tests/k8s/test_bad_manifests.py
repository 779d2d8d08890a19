"""The checks of the manifests see what they are there for: each fault of bad_manifests.yaml, with its own message."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference_pool_schema import pool_findings
from manifest_pods import check_pods
from manifest_references import check_references
from manifest_schemas import VERSIONS, custom_findings, schema_findings
from manifest_traffic import check_traffic
from manifests import Build, Manifest, containers_of, name_of, of_kind, render

FAULTS = yaml.safe_load((Path(__file__).parent / "bad_manifests.yaml").read_text(encoding="utf-8"))


def faulty(fault: dict[str, Any]) -> tuple[list[Manifest], Manifest]:
    """The overlay cpu (with the components that the fault names) with the fault, and the object that has it."""
    items = copy.deepcopy(render(Build("overlays/cpu", tuple(fault.get("components", ())))))
    [item] = [item for item in items if name_of(item) == fault["object"]]
    *parents, last = fault["path"]
    place: Any = item
    for key in parents:
        place = place[key]
    if "value" in fault:
        place[last] = fault["value"]
    else:
        del place[last]
    return items, item


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["fault"])
def test_a_fault_is_found(fault: dict[str, Any]):
    items, item = faulty(fault)
    findings = [*check_pods(items), *check_references(items), *check_traffic(items)]
    findings += schema_findings([item], VERSIONS[0])
    assert any(fault["finding"] in finding for finding in findings), findings


def test_each_fault_has_a_message_of_its_own():
    assert len({fault["finding"] for fault in FAULTS}) == len(FAULTS)


def test_both_components_that_scale_do_not_render_together():
    with pytest.raises(AssertionError, match="Unable to remove nonexistent key: replicas"):
        render(Build("overlays/cpu", ("hpa", "keda")))


def test_two_autoscalers_of_one_workload_are_refused():
    [other] = [item for item in render(Build("overlays/cpu", ("keda",))) if item["kind"] == "ScaledObject"]
    findings = list(check_references([*render(Build("overlays/cpu", ("hpa",))), other]))
    assert findings == ["StatefulSet/stepwire-engine-core: has 2 autoscalers, which work against each other"]


def test_an_autoscaler_beside_a_fixed_scale_is_refused():
    items = copy.deepcopy(render(Build("overlays/cpu", ("keda",))))
    [engine] = [item for item in items if item["kind"] == "StatefulSet"]
    engine["spec"]["replicas"] = 1
    assert any("every apply resets the scale" in finding for finding in check_references(items))


def test_a_custom_resource_of_the_wrong_type_is_found():
    items = copy.deepcopy(render(Build("overlays/cpu", ("keda",))))
    [scaled] = [item for item in items if item["kind"] == "ScaledObject"]
    scaled["spec"]["minReplicaCount"] = "one"
    monitor = {"apiVersion": "monitoring.coreos.com/v9", "kind": "PodMonitor", "metadata": {"name": "a"}}
    findings = custom_findings([scaled, monitor])
    assert len(findings) == 2
    assert "minReplicaCount" in findings[0]
    assert findings[1] == "PodMonitor/a: no operator has monitoring.coreos.com/v9 PodMonitor"


# Component on the overlay cpu, kind, where a field is that no operator knows.
MISSPELT: list[tuple[tuple[str, ...], str, list[str | int]]] = [
    (("keda",), "ScaledObject", ["spec", "cooldownSeconds"]),
    (("keda",), "ScaledObject", ["spec", "fallback", "replica"]),
    (("pod-monitor",), "PodMonitor", ["spec", "podMetricsEndpoints", 0, "intervall"]),
    (("prometheus-rules",), "PrometheusRule", ["spec", "groups", 0, "rules", 0, "labelz"]),
    (("gateway-api",), "Gateway", ["spec", "listeners", 0, "hostName"]),
    (("gateway-api",), "HTTPRoute", ["spec", "rules", 0, "timeout"]),
    (("gateway-api",), "GRPCRoute", ["spec", "rules", 0, "timeouts"]),
    (("mtls", "cert-manager"), "Certificate", ["spec", "renewBeforeDays"]),
    (("mtls", "cert-manager"), "Issuer", ["spec", "selfsigned"]),
]


def test_misspelt_fields_of_custom_resources_are_found():
    resources = []
    for components, kind, path in MISSPELT:
        resources.append(copy.deepcopy(of_kind(render(Build("overlays/cpu", components)), kind)[0]))
        *parents, last = path
        place: Any = resources[-1]
        for key in parents:
            place = place[key]
        place[last] = {}
    # All at once: reading the declarations takes seconds.
    findings = custom_findings(resources)
    assert len(findings) == len(MISSPELT)
    for finding, resource, (_, _, path) in zip(findings, resources, MISSPELT, strict=True):
        assert finding.startswith(f"{name_of(resource)}: ")
        assert f'"{path[-1]}"' in finding


@pytest.mark.parametrize(
    ("path", "value", "finding"),
    [
        (["spec", "targetPort"], 50051, "'targetPort' was unexpected"),
        (["spec", "targetPorts"], [{"number": 0}], "0 is less than the minimum of 1"),
        (["spec", "targetPorts"], [{"number": 1}, {"number": 1}], "has non-unique elements"),
        (["spec", "appProtocol"], "grpc", "'grpc' is not one of"),
        (["spec", "selector", "matchExpressions"], [], "'matchExpressions' was unexpected"),
        (["spec", "endpointPickerRef"], {"name": "picker"}, "'port' is a required property"),
        (["spec", "endpointPickerRef", "failureMode"], "Open", "'Open' is not one of"),
        (["apiVersion"], "inference.networking.x-k8s.io/v1alpha2", "'inference.networking.k8s.io/v1' was expected"),
    ],
)
def test_a_fault_of_an_inference_pool_is_found(path: list[str], value: object, finding: str):
    [found] = of_kind(render(Build("overlays/colocated", ("inference-pool",))), "InferencePool")
    pool = copy.deepcopy(found)
    assert list(pool_findings(pool)) == []
    *parents, last = path
    place: Any = pool
    for key in parents:
        place = place[key]
    place[last] = value
    [sentence] = pool_findings(pool)
    assert finding in sentence


def test_an_inference_pool_speaks_grpc_to_the_port_that_the_pods_have():
    items = render(Build("overlays/colocated", ("inference-pool",)))
    [pool] = of_kind(items, "InferencePool")
    [frontend] = of_kind(items, "Deployment")
    ports = {port["name"]: port["containerPort"] for item in containers_of(frontend) for port in item["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["grpc"]}]
    assert pool["spec"]["appProtocol"] == "kubernetes.io/h2c"


@pytest.mark.parametrize(
    ("component", "finding"),
    [
        ("mtls", "STEPWIRE_TLS_CLIENT_CA_FILE is /etc/stepwire/tls/ca.crt, which engine-core has no mount for"),
        ("hf-token", "HF_TOKEN_PATH is /etc/stepwire/hf/token, which engine-core has no mount for"),
        ("hpa", "StatefulSet/stepwire-engine-core: an autoscaler's target does not exist"),
        ("pod-monitor", "PodMonitor/stepwire-engine-core: its selector selects no pod"),
    ],
)
def test_a_component_that_does_not_go_with_colocated_pods_is_refused(component: str, finding: str):
    findings = list(check_references(render(Build("overlays/colocated", (component,)))))
    assert any(finding in found for found in findings), findings
