"""The manifests of k8s/ as a cluster would get them: every overlay, and every component on top of one."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from skips import require_program

K8S = Path(__file__).parent.parent / "k8s"
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Build:
    """What is rendered together: an overlay (a directory below k8s/) and components on top of it."""

    overlay: str
    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((self.overlay.removeprefix("overlays/"), *self.components))


OVERLAYS = [Build(".")] + [Build(f"overlays/{name}") for name in ("cpu", "gpu", "ha", "test", "colocated")]
# The last component of each is the one that is tried; those before it are what it needs.
_ON_CPU = (
    ("hpa",), ("keda",), ("mtls",), ("mtls", "cert-manager"), ("auth",), ("auth", "admin-access"), ("hf-token",),
    ("hub-egress",), ("model-pvc",), ("model-cache-per-replica",), ("model-image",), ("shared-memory",), ("otel",),
    ("pod-monitor",), ("prometheus-rules",), ("grafana-dashboard",), ("gateway-api",), ("grpc-web",),
)  # fmt: skip
COLOCATED = (
    "auth", "admin-access", "otel", "gateway-api", "grpc-web", "prometheus-rules", "grafana-dashboard",
    "inference-pool",
)  # fmt: skip
COMPONENTS = [
    *(Build("overlays/cpu", names) for names in _ON_CPU),
    Build("overlays/colocated", ("inference-pool",)),
    # All that README says goes with it.
    Build("overlays/colocated", COLOCATED),
    # Many at once, as somebody's own overlay may have them.
    Build("overlays/ha", ("cert-manager", "auth", "otel", "grafana-dashboard", "model-cache-per-replica")),
]
BUILDS = [*OVERLAYS, *COMPONENTS]


@cache
def render(build: Build) -> list[Manifest]:
    """The objects of a build; skips the test where nothing can render. Not to be changed: they are kept."""
    if not build.components:
        return kustomize(K8S / build.overlay)
    # A component is used as README says: from a kustomization outside of k8s/ that names the overlay and the component.
    with tempfile.TemporaryDirectory() as directory:
        base = os.path.relpath(K8S.resolve(), Path(directory).resolve())
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "stepwire",
            "resources": [f"{base}/{build.overlay}"],
            "components": [f"{base}/components/{name}" for name in build.components],
        }
        (Path(directory) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
        return kustomize(Path(directory))


def kustomize(directory: Path) -> list[Manifest]:
    """The objects that a kustomization stands for. Raises AssertionError with what the program says."""
    program = require_program("kubectl", "kustomize", how="kubectl 1.27 or newer, which renders without a cluster")
    verb = "kustomize" if Path(program).name == "kubectl" else "build"
    done = subprocess.run([program, verb, str(directory)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    # Kustomize only warns of fields that are going away.
    assert not done.stderr, done.stderr
    # The parser in C: the dashboards are long.
    return [item for item in yaml.load_all(done.stdout, yaml.CSafeLoader) if item]


def name_of(item: Manifest) -> str:
    """`Kind/name`, as messages call an object."""
    return f"{item['kind']}/{item['metadata']['name']}"


def of_kind(items: list[Manifest], *kinds: str) -> list[Manifest]:
    """The objects of these kinds."""
    return [item for item in items if item["kind"] in kinds]


def workloads(items: list[Manifest]) -> list[Manifest]:
    """What has a pod template."""
    return of_kind(items, "Deployment", "StatefulSet")


def pod_of(workload: Manifest) -> Manifest:
    """The spec of its pods."""
    return workload["spec"]["template"]["spec"]


def containers_of(workload: Manifest) -> list[Manifest]:
    """All of them, side-cars and other init containers too."""
    pod = pod_of(workload)
    return [*pod.get("initContainers", []), *pod["containers"]]


def environment_of(items: list[Manifest], container: Manifest) -> dict[str, str]:
    """What the process would see; a value that only a cluster knows is `1`, which is a name and a number."""
    maps = {item["metadata"]["name"]: item["data"] for item in of_kind(items, "ConfigMap")}
    variables: dict[str, str] = {}
    for source in container.get("envFrom", []):
        variables |= maps.get(source["configMapRef"]["name"], {})
    for variable in container.get("env", []):
        variables[variable["name"]] = variable.get("value", "1")
    return variables
