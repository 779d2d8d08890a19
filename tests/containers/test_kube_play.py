"""The pods of the overlay cpu under `podman kube play`: their variables, volumes and security contexts with the images.

podman is no cluster: it ignores gRPC probes, knows no StatefulSet, publishes every port on the host and gives volumes
of one name to all pods. What it can not do is taken out of the manifests first, and nothing else.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from manifests import Manifest, containers_of, of_kind, pod_of, render, workloads
from running_containers import OVERLAY, frontend_container, image_of, network_of_test, podman

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]

UNKNOWN_TO_PODMAN = ("metadata.namespace", "spec.nodeName")


def playable(workload: Manifest) -> Manifest:
    """The first pod of a workload, under the name by which others look for it."""
    name = workload["metadata"]["name"]
    pod = copy.deepcopy(pod_of(workload))
    [container] = pod["containers"]
    container["image"] = image_of(container)
    del container["ports"]
    for variable in container["env"]:
        if variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") in UNKNOWN_TO_PODMAN:
            variable |= {"value": "podman"}
            del variable["valueFrom"]
    for volume in (*container["volumeMounts"], *pod["volumes"]):
        volume["name"] = f"{name}-{volume['name']}"
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod}


def test_the_pods_of_the_overlay_answer(tmp_path: Path):
    items = render(OVERLAY)
    pods = [playable(workload) for workload in workloads(items)]
    assert [len(containers_of(workload)) for workload in workloads(items)] == [1, 1]
    file = tmp_path / "pods.yaml"
    file.write_text(yaml.safe_dump_all([*of_kind(items, "ConfigMap"), *pods]), encoding="utf-8")
    with network_of_test() as network:
        try:
            podman("kube", "play", "--network", network, str(file))
            frontend = frontend_container("stepwire-frontend-frontend")
            frontend.wait_for_health(True)
            assert frontend.execute("stepwire", "generate", "Once upon a time", "--max-tokens", "4").strip()
            assert frontend.inspect("{{.HostConfig.ReadonlyRootfs}} {{.Config.User}}") == "true 10001:10001"
        finally:
            podman("kube", "down", str(file))
