"""What the API server says of the manifests."""

from __future__ import annotations

import pytest

import cluster_manifests
from cluster_facts import Facts
from cluster_kubectl import Kubectl, KubectlError, text_of
from cluster_options import Options
from cluster_stack import ClusterStack
from manifests import BUILDS, K8S, Build


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_the_server_would_take(build: Build, namespace: str, options: Options, kubectl: Kubectl, facts: Facts) -> None:
    items = cluster_manifests.rendered(options, K8S / build.overlay, build.components)
    items = cluster_manifests.namespaced(items)
    if missing := facts.missing(items):
        pytest.skip(f"this cluster has no {', '.join(missing)}")
    kubectl.apply(options.filtered(text_of(items)), "--server-side", "--dry-run=server", "--force-conflicts")


def test_a_misspelt_field_is_refused_by_the_server(namespace: str, options: Options, kubectl: Kubectl) -> None:
    items = cluster_manifests.namespaced(cluster_manifests.rendered(options))
    [deployment] = [item for item in items if item["kind"] == "Deployment"]
    deployment["spec"]["minReadySecond"] = 5
    with pytest.raises(KubectlError, match="minReadySecond"):
        kubectl.apply(options.filtered(text_of([deployment])), "--server-side", "--dry-run=server")


def test_a_second_apply_changes_nothing(stack: ClusterStack) -> None:
    lines = stack.apply()
    assert [line for line in lines if not line.endswith(" unchanged")] == []


def test_admission_refuses_a_pod_of_root(stack: ClusterStack) -> None:
    pod = cluster_manifests.root_pod(stack.manifests(), stack.namespace)
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        stack.kubectl.apply(stack.options.filtered(text_of([pod])), "--dry-run=server")


def test_autoscalers_read_their_metrics(stack: ClusterStack, facts: Facts) -> None:
    if not facts.has_pod_metrics:
        pytest.skip("this cluster has no adapter for metrics of pods")
    items = cluster_manifests.rendered(stack.options, components=["hpa"])
    scalers = [item for item in items if item["kind"] == "HorizontalPodAutoscaler"]
    text = stack.options.filtered(text_of(scalers))
    stack.kubectl.apply(text)
    try:
        for scaler in scalers:
            stack.kubectl.wait(f"hpa/{scaler['metadata']['name']}", "condition=ScalingActive", 180)
    finally:
        stack.kubectl("delete", "--filename", "-", stdin=text)
