"""NetworkPolicies, where the cluster's network enforces them, and disruption budgets."""

from __future__ import annotations

import json

import pytest

from cluster_kubectl import KubectlError
from cluster_stack import ClusterStack
from manifests import Manifest


@pytest.fixture
def enforced(enforces_policies: bool) -> None:
    if not enforces_policies:
        pytest.skip("the network of this cluster does not enforce NetworkPolicies")


def address_of(stack: ClusterStack, component: str) -> str:
    return str(stack.pods(component)[0]["status"]["podIP"])


@pytest.mark.usefixtures("enforced")
def test_a_client_reaches_the_frontend_and_not_the_engine(stack: ClusterStack) -> None:
    assert stack.can_connect(address_of(stack, "frontend"), 50051)
    assert stack.can_connect(address_of(stack, "frontend"), 8000)
    assert not stack.can_connect(address_of(stack, "engine-core"), 50061)


@pytest.mark.usefixtures("enforced")
def test_metrics_are_closed_until_the_namespace_has_the_label(stack: ClusterStack) -> None:
    places = [(address_of(stack, "frontend"), 9100), (address_of(stack, "engine-core"), 9101)]
    assert not any(stack.can_connect(*place) for place in places)
    stack.kubectl("label", "namespace", stack.namespace, "stepwire.io/monitoring=true")
    try:
        assert all(stack.can_connect(*place) for place in places)
    finally:
        stack.kubectl("label", "namespace", stack.namespace, "stepwire.io/monitoring-")


def evict(stack: ClusterStack, pod: Manifest) -> None:
    """As the drain of a node does. Raises KubectlError where a budget forbids it."""
    name = pod["metadata"]["name"]
    path = f"/api/v1/namespaces/{stack.namespace}/pods/{name}/eviction"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction"}
    eviction |= {"metadata": {"name": name, "namespace": stack.namespace}}
    stack.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))


def test_a_second_eviction_is_refused_while_one_pod_is_down(stack: ClusterStack) -> None:
    first, second = stack.pods("frontend")
    try:
        evict(stack, first)
        with pytest.raises(KubectlError, match="disruption budget"):
            evict(stack, second)
    finally:
        stack.ready()
