"""The manifests of a test run: an overlay in a namespace of its own, with its images and settings; a client's pod."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

import rollout_load
from cluster_options import Options
from manifests import K8S, Manifest, containers_of, kustomize, of_kind, pod_of, workloads

CLUSTER_WIDE = ("Namespace", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition")
CLIENT = "stepwire-test-client"
CLIENT_LABELS = {"app.kubernetes.io/name": CLIENT}
FRONTEND, ENGINE = "stepwire-frontend", "stepwire-engine-core"
Settings = Mapping[str, Mapping[str, str]]


def rendered(
    options: Options, overlay: Path | None = None, components: Sequence[str] = (), settings: Settings | None = None
) -> list[Manifest]:
    """All objects in the namespace of the run. `settings`: name of a ConfigMap without its hash -> variables."""
    generators = [
        {"name": name, "behavior": "merge", "literals": [f"{key}={value}" for key, value in variables.items()]}
        for name, variables in (settings or {}).items()
    ]
    # Beside k8s/, as the overlay of a user is: Kustomize takes directories of others alone.
    with tempfile.TemporaryDirectory() as directory:
        base = Path(os.path.relpath((overlay or options.overlay).resolve(), Path(directory).resolve()))
        parts = os.path.relpath(K8S.resolve() / "components", Path(directory).resolve())
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": options.namespace,
            "resources": [str(base)],
            "components": [f"{parts}/{name}" for name in components],
            "configMapGenerator": generators,
        }
        (Path(directory) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
        return [_with_image(item, options) for item in kustomize(Path(directory))]


def _with_image(item: Manifest, options: Options) -> Manifest:
    """stepwire/NAME:TAG under the prefix and the tag of the run; what stands behind a - (-embedded) stays."""
    for container in containers_of(item) if workloads([item]) else ():
        name, _, tag = container["image"].rpartition("/")[2].partition(":")
        if container["image"].startswith("stepwire/"):
            _, dash, kind = tag.partition("-")
            container["image"] = f"{options.image_prefix}/{name}:{(options.image_tag or tag.split('-')[0])}{dash}{kind}"
    return item


def namespace_labels(items: list[Manifest]) -> dict[str, str]:
    """Those of the overlay's namespace, which say how strict its admission is."""
    [namespace] = of_kind(items, "Namespace")
    labels: dict[str, str] = namespace["metadata"]["labels"]
    return labels


def namespaced(items: list[Manifest]) -> list[Manifest]:
    """Without what lies outside the run's namespace, which a run never touches."""
    return [item for item in items if item["kind"] not in CLUSTER_WIDE]


def images_of(items: list[Manifest]) -> list[str]:
    """Of all pods, each once."""
    return sorted({container["image"] for item in workloads(items) for container in containers_of(item)})


def shown_to_signals(items: list[Manifest]) -> list[Manifest]:
    """Pods whose containers share one list of processes: the first process of a list can not be stopped from within."""
    items = copy.deepcopy(items)
    for item in workloads(items):
        pod_of(item)["shareProcessNamespace"] = True
    return items


def client_objects(items: list[Manifest], namespace: str) -> list[Manifest]:
    """A pod that does nothing until told, from the frontend's image, with the program of the load."""
    [frontend] = [item for item in workloads(items) if item["metadata"]["name"] == FRONTEND]
    image = containers_of(frontend)[0]["image"]
    program = Path(rollout_load.__file__)
    metadata = {"name": CLIENT, "namespace": namespace, "labels": CLIENT_LABELS}
    container = {
        "name": "client",
        "image": image,
        "command": ["/opt/venv/bin/python", "-c", "import signal; signal.pause()"],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": pod_security(frontend),
        "volumeMounts": [{"name": "load", "mountPath": "/load"}],
    }
    spec = {
        "automountServiceAccountToken": False,
        # The first process of a container ignores SIGTERM.
        "terminationGracePeriodSeconds": 1,
        "securityContext": pod_of(frontend)["securityContext"],
        "containers": [container],
        "volumes": [{"name": "load", "configMap": {"name": CLIENT}}],
    }
    text = program.read_text(encoding="utf-8")
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {program.name: text}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
    ]


def pod_security(workload: Manifest) -> Manifest:
    """What the containers of a workload may do."""
    context: Manifest = containers_of(workload)[0]["securityContext"]
    return context


def client_policy(namespace: str) -> Manifest:
    """The client may ask whom it wants to, so that what refuses it is the other side's policy."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": CLIENT, "namespace": namespace},
        "spec": {"podSelector": {"matchLabels": CLIENT_LABELS}, "policyTypes": ["Egress"], "egress": [{}]},
    }


def root_pod(items: list[Manifest], namespace: str) -> Manifest:
    """The client as root, which admission has to refuse."""
    pod = copy.deepcopy(client_objects(items, namespace)[1])
    pod["metadata"]["name"] = "stepwire-test-root"
    pod["spec"]["securityContext"] |= {"runAsNonRoot": False, "runAsUser": 0}
    return pod
