"""Whether the objects of a build fit together. A check takes all objects and says what is wrong, one sentence each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from manifests import Manifest, containers_of, environment_of, name_of, of_kind, pod_of, workloads

PROTOS = Path(__file__).parent.parent / "protos"
GRPC_SERVICES = {
    f"{re.search(r'^package (.+);', text, re.MULTILINE)[1]}.{service}"  # type: ignore[index]
    for text in (path.read_text(encoding="utf-8") for path in PROTOS.rglob("*.proto"))
    for service in re.findall(r"^service (\w+)", text, re.MULTILINE)
}
# Settings whose value is the path of a file.
_FILE_SETTING = re.compile(r"STEPWIRE_\w+_FILE|HF_TOKEN_PATH")
CLUSTER_WIDE = ("Namespace",)


def check_references(items: list[Manifest]) -> Iterator[str]:
    """All checks of this file."""
    for check in (_namespaces, _selectors, _services, _budgets, _policies, _configs, _files, _probes, _scalers):
        yield from check(items)


def _namespaces(items: list[Manifest]) -> Iterator[str]:
    names = [item["metadata"]["name"] for item in of_kind(items, "Namespace")]
    if len(names) != 1:
        yield f"there are {len(names)} namespaces, and one is needed"
    for item in items:
        if item["kind"] not in CLUSTER_WIDE and item["metadata"].get("namespace") not in names:
            yield f"{name_of(item)}: is not in the namespace that is made"
    for item in of_kind(items, "Namespace"):
        if item["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"{name_of(item)}: does not enforce the restricted standard"


def _matches(selector: Manifest, workload: Manifest) -> bool:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", [])
    )


def selected(items: list[Manifest], selector: Manifest) -> list[Manifest]:
    """The workloads whose pods a selector selects."""
    return [workload for workload in workloads(items) if _matches(selector, workload)]


def _selectors(items: list[Manifest]) -> Iterator[str]:
    for workload in workloads(items):
        if selected(items, workload["spec"]["selector"]) != [workload]:
            yield f"{name_of(workload)}: its selector does not select its pods alone"
        for constraint in pod_of(workload).get("topologySpreadConstraints", []):
            if selected(items, constraint["labelSelector"]) != [workload]:
                yield f"{name_of(workload)}: its spread counts other pods than its own"
    for item in of_kind(items, "PodMonitor", "InferencePool"):
        if not selected(items, item["spec"]["selector"]):
            yield f"{name_of(item)}: its selector selects no pod"


def _services(items: list[Manifest]) -> Iterator[str]:
    for service in of_kind(items, "Service"):
        pods = selected(items, {"matchLabels": service["spec"]["selector"]})
        if not pods:
            yield f"{name_of(service)}: its selector selects no pod"
        for port in service["spec"]["ports"]:
            for pod in pods:
                if port["targetPort"] not in ports_of(pod):
                    yield f"{name_of(service)}: no container of {name_of(pod)} has a port {port['targetPort']}"
    names = {item["metadata"]["name"] for item in of_kind(items, "Service")}
    for item in of_kind(items, "StatefulSet"):
        if item["spec"]["serviceName"] not in names:
            yield f"{name_of(item)}: there is no Service {item['spec']['serviceName']}"


def ports_of(workload: Manifest) -> dict[str, int]:
    """Name -> number of the ports that its containers declare."""
    return {port["name"]: port["containerPort"] for item in containers_of(workload) for port in item.get("ports", [])}


def _budgets(items: list[Manifest]) -> Iterator[str]:
    covered = []
    for budget in of_kind(items, "PodDisruptionBudget"):
        if "minAvailable" in budget["spec"]:
            yield f"{name_of(budget)}: minAvailable can block the drain of a node for ever"
        covered += selected(items, budget["spec"]["selector"])
    yield from (f"{name_of(item)}: has no PodDisruptionBudget" for item in workloads(items) if item not in covered)


def _policies(items: list[Manifest]) -> Iterator[str]:
    policies = of_kind(items, "NetworkPolicy")
    closed = [
        policy
        for policy in policies
        if policy["spec"]["podSelector"] == {} and not {"ingress", "egress"} & set(policy["spec"])
    ]
    if not any(set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"} for policy in closed):
        yield "there is no NetworkPolicy that denies what no other allows"
    for policy in policies:
        pods = selected(items, policy["spec"]["podSelector"])
        if not pods:
            yield f"{name_of(policy)}: selects no pod"
        open_ports = {number for pod in pods for number in ports_of(pod).values()}
        for rule in policy["spec"].get("ingress", []):
            if not rule.get("from"):
                yield f"{name_of(policy)}: lets in everybody"
            for port in rule.get("ports", []):
                if port["port"] not in open_ports:
                    yield f"{name_of(policy)}: opens port {port['port']}, which no pod has"


def _configs(items: list[Manifest]) -> Iterator[str]:
    maps = {item["metadata"]["name"] for item in of_kind(items, "ConfigMap")}
    accounts = {item["metadata"]["name"] for item in of_kind(items, "ServiceAccount")} | {None}
    for workload in workloads(items):
        pod = pod_of(workload)
        wanted = [
            source["configMapRef"]["name"] for item in containers_of(workload) for source in item.get("envFrom", [])
        ]
        wanted += [volume["configMap"]["name"] for volume in pod.get("volumes", []) if "configMap" in volume]
        yield from (f"{name_of(workload)}: there is no ConfigMap {name}" for name in wanted if name not in maps)
        if pod.get("serviceAccountName") not in accounts:
            yield f"{name_of(workload)}: there is no ServiceAccount {pod['serviceAccountName']}"
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        for mount in (mount for item in containers_of(workload) for mount in item.get("volumeMounts", [])):
            if mount["name"] not in volumes:
                yield f"{name_of(workload)}: there is no volume {mount['name']}"


def _files(items: list[Manifest]) -> Iterator[str]:
    """Files that settings name come from a mount: an image has none of them."""
    for workload in workloads(items):
        for container in containers_of(workload):
            mounts = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            for name, value in environment_of(items, container).items():
                if _FILE_SETTING.fullmatch(name) and value and not _is_below(value, mounts):
                    yield f"{name_of(workload)}: {name} is {value}, which {container['name']} has no mount for"


def _is_below(path: str, mounts: list[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(mount) for mount in mounts)


def _probes(items: list[Manifest]) -> Iterator[str]:
    for workload in workloads(items):
        for container in containers_of(workload):
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            for name, probe in container.items():
                if not name.endswith("Probe"):
                    continue
                asked = probe.get("grpc") or probe.get("httpGet") or {}
                if asked and asked["port"] not in (*ports, *ports.values()):
                    yield f"{name_of(workload)}: {name} asks a port that is not declared"
                if asked.get("service") and asked["service"] not in GRPC_SERVICES:
                    yield f"{name_of(workload)}: {name} asks for {asked['service']}, which no proto has"


def _scalers(items: list[Manifest]) -> Iterator[str]:
    scaled = Counter(
        (item["spec"]["scaleTargetRef"]["kind"], item["spec"]["scaleTargetRef"]["name"])
        for item in of_kind(items, "HorizontalPodAutoscaler", "ScaledObject")
    )
    existing = {(item["kind"], item["metadata"]["name"]): item for item in workloads(items)}
    for target, count in scaled.items():
        name = "/".join(target)
        if count > 1:
            yield f"{name}: has {count} autoscalers, which work against each other"
        if target not in existing:
            yield f"{name}: an autoscaler's target does not exist"
        elif "replicas" in existing[target]["spec"]:
            yield f"{name}: every apply resets the scale: spec.replicas next to an autoscaler"
