"""What every pod of k8s/ has to be like. A check takes all objects of a build and yields a sentence for each fault."""

from __future__ import annotations

from collections.abc import Iterator

from manifests import Manifest, containers_of, environment_of, name_of, of_kind, pod_of, workloads

OTHER_KINDS_WITH_PODS = ("Pod", "ReplicaSet", "ReplicationController", "DaemonSet", "Job", "CronJob", "PodTemplate")
# Of the images.
USER = 10001
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
# The server's own end, and time to write the last log line.
GRACE_MARGIN_S = 10


def check_pods(items: list[Manifest]) -> Iterator[str]:
    """All checks of this file."""
    for item in of_kind(items, *OTHER_KINDS_WITH_PODS):
        yield f"{name_of(item)}: nothing here looks at the pods of this kind"
    for workload in workloads(items):
        yield from (f"{name_of(workload)}: {finding}" for finding in _pod(workload))
        for container in containers_of(workload):
            place = f"{name_of(workload)}, container {container['name']}"
            findings = [*_container(container), *_resources(container), *_grace(items, workload, container)]
            yield from (f"{place}: {finding}" for finding in findings)


def _pod(workload: Manifest) -> Iterator[str]:
    pod = pod_of(workload)
    context = pod.get("securityContext", {})
    if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
        yield "runs as root: runAsNonRoot and runAsUser are needed"
    yield from (
        f"{field} is {context.get(field)}, and {USER} owns what the image has"
        for field in ("runAsUser", "runAsGroup", "fsGroup")
        if context.get(field) != USER
    )
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccompProfile RuntimeDefault"
    for field in ("automountServiceAccountToken", "enableServiceLinks"):
        if pod.get(field) is not False:
            yield f"{field} is not false"
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"{field} is refused by the restricted standard"
    if not pod.get("topologySpreadConstraints"):
        yield "is not spread over nodes: topologySpreadConstraints is missing"
    for volume in pod.get("volumes", []):
        yield from _volume(volume)


def _volume(volume: Manifest) -> Iterator[str]:
    name = volume["name"]
    if "hostPath" in volume:
        yield f"volume {name} is a hostPath"
    if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
        yield f"volume {name} has no sizeLimit"
    if "secret" in volume and volume["secret"].get("optional") is not False:
        yield f"volume {name} may be missing unnoticed: optional is not false"


def _container(container: Manifest) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("readOnlyRootFilesystem") is not True:
        yield "its root file system can be written"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield "its capabilities are not dropped"
    if context.get("privileged") or context.get("runAsUser") == 0:
        yield "runs as root"
    yield from (f"{probe} is missing" for probe in PROBES if probe not in container)
    _, _, tag = container["image"].rpartition("/")[2].partition(":")
    if tag in ("", "latest") and "@sha256:" not in container["image"]:
        yield f"image {container['image']} names no version"
    if any("hostPort" in port for port in container.get("ports", [])):
        yield "hostPort is refused by the restricted standard"
    if any("subPath" in mount for mount in container.get("volumeMounts", [])):
        yield "a subPath mount is never updated"
    if any("secretKeyRef" in variable.get("valueFrom", {}) for variable in container.get("env", [])):
        yield "a secret in a variable shows in dumps: mount it as a file"


def _resources(container: Manifest) -> Iterator[str]:
    resources = container.get("resources", {})
    for name in ("cpu", "memory"):
        if name not in resources.get("requests", {}):
            yield f"requests no {name}"
    if "memory" not in resources.get("limits", {}):
        yield "has no memory limit"
    if "cpu" in resources.get("limits", {}):
        yield "has a CPU limit, which shows as time between tokens"


def _grace(items: list[Manifest], workload: Manifest, container: Manifest) -> Iterator[str]:
    """The kubelet kills what has not ended by itself by then."""
    environment = environment_of(items, container)
    if "STEPWIRE_DRAIN_TIMEOUT_S" not in environment:
        return
    needed = GRACE_MARGIN_S + sum(
        float(environment.get(f"STEPWIRE_{name}", 0)) for name in ("PRE_STOP_DELAY_S", "DRAIN_TIMEOUT_S")
    )
    grace = pod_of(workload).get("terminationGracePeriodSeconds", 30)
    if grace < needed:
        yield f"terminationGracePeriodSeconds is {grace}, but its drain may take {needed:.0f} s"
