"""What a cluster has: nothing is assumed, and what is missing is the reason of a skip."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass

from cluster_kubectl import Kubectl, KubectlError
from manifests import Manifest

REACH_TIMEOUT = "--request-timeout=10s"
DEFAULT_STORAGE = "storageclass.kubernetes.io/is-default-class"


@dataclass(frozen=True)
class Facts:
    """`api_versions` are group/version, as manifests name them."""

    version: str
    num_nodes: int
    has_dns: bool
    has_storage: bool
    has_gpu: bool
    api_versions: frozenset[str]

    @property
    def has_pod_metrics(self) -> bool:
        """An adapter that autoscalers ask for metrics of pods."""
        return any(version.startswith("custom.metrics.k8s.io/") for version in self.api_versions)

    def missing(self, items: list[Manifest]) -> list[str]:
        """The versions of APIs that objects need and this cluster does not have."""
        return sorted({item["apiVersion"] for item in items} - self.api_versions)

    def __str__(self) -> str:
        parts = {
            "DNS": self.has_dns,
            "default storage class": self.has_storage,
            "GPU": self.has_gpu,
            "metrics of pods": self.has_pod_metrics,
        }
        found = ", ".join(f"{'' if is_there else 'no '}{name}" for name, is_there in parts.items())
        return f"Kubernetes {self.version}, {self.num_nodes} nodes, {found}"


def why_unreachable(kubectl: Kubectl) -> str:
    """What stands in the way of any test; empty where a server answers."""
    try:
        _server_version(kubectl)
    except KubectlError as error:
        return f"no Kubernetes API server answers: {error.said.splitlines()[-1]}"
    except subprocess.TimeoutExpired:
        return "no Kubernetes API server answers in time"
    return ""


def detect(kubectl: Kubectl) -> Facts:
    """Asks for everything once."""
    nodes = _listed(kubectl, "nodes")
    classes = _listed(kubectl, "storageclasses")
    return Facts(
        version=_server_version(kubectl),
        num_nodes=len(nodes),
        has_dns=bool(_listed(kubectl, "services", "--namespace", "kube-system", "--selector", "k8s-app=kube-dns")),
        has_storage=any(item["metadata"].get("annotations", {}).get(DEFAULT_STORAGE) == "true" for item in classes),
        has_gpu=any(int(node["status"].get("allocatable", {}).get("nvidia.com/gpu", 0)) for node in nodes),
        api_versions=frozenset(kubectl("api-versions").split()),
    )


def _listed(kubectl: Kubectl, *what: str) -> list[Manifest]:
    """Nothing where the user of the run may not look outside of namespaces."""
    try:
        return kubectl.items(*what)
    except KubectlError:
        return []


def _server_version(kubectl: Kubectl) -> str:
    versions = json.loads(kubectl("version", "--output", "json", REACH_TIMEOUT))
    # Without a server kubectl may tell its own version and end well.
    if "serverVersion" not in versions:
        raise KubectlError(["version"], "there is no serverVersion in the answer")
    version: str = versions["serverVersion"]["gitVersion"]
    return version
