"""What probes make of processes that hang or die."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from cluster_kubectl import KubectlError
from cluster_stack import ClusterStack
from manifests import Manifest

ENGINE_POD = "stepwire-engine-core-0"
RESTARTS = "jsonpath={.status.containerStatuses[0].restartCount}"
# Three failures of a frontend's liveness take 30 s, and its end a few more.
NOTICED_S = 60


def restarts_of(pod: Manifest) -> int:
    count: int = pod["status"]["containerStatuses"][0]["restartCount"]
    return count


@pytest.fixture
def restarts(stack: ClusterStack) -> Iterator[int]:
    """How often the first engine was restarted before; one engine, so that readiness is its alone."""
    stack.scale(1)
    yield restarts_of(stack.kubectl.get("pod", ENGINE_POD))
    stack.ready()


def test_an_engine_that_hangs_is_not_ready_and_then_restarted(stack: ClusterStack, restarts: int) -> None:
    stack.signal(ENGINE_POD, "engine_core", signal.SIGSTOP)
    stack.kubectl.wait(f"pod/{ENGINE_POD}", "condition=Ready=false", 60)
    # Six failures of liveness, and the grace of a process that does not hear SIGTERM.
    stack.kubectl.wait(f"pod/{ENGINE_POD}", f"{RESTARTS}={restarts + 1}", 240)
    stack.kubectl.wait(f"pod/{ENGINE_POD}", "condition=Ready", 300)


def test_without_an_engine_no_frontend_is_ready_and_none_is_restarted(stack: ClusterStack) -> None:
    before = {pod["metadata"]["name"]: restarts_of(pod) for pod in stack.pods("frontend")}
    stack.kubectl("scale", "statefulset/stepwire-engine-core", "--replicas=0")
    try:
        for name in before:
            stack.kubectl.wait(f"pod/{name}", "condition=Ready=false", 120)
        # A restart leaves the pod and its uid: what counts it is asked, for as long as liveness would need to fail.
        name, count = next(iter(before.items()))
        with pytest.raises(KubectlError, match="timed out"):
            stack.kubectl.wait(f"pod/{name}", f"{RESTARTS}={count + 1}", NOTICED_S)
        assert {pod["metadata"]["name"]: restarts_of(pod) for pod in stack.pods("frontend")} == before
    finally:
        stack.scale(1)
        stack.ready()


def test_an_engine_that_is_killed_comes_back(stack: ClusterStack, restarts: int) -> None:
    stack.signal(ENGINE_POD, "engine_core", signal.SIGKILL)
    stack.kubectl.wait(f"pod/{ENGINE_POD}", f"{RESTARTS}={restarts + 1}", 120)
    stack.kubectl.wait(f"pod/{ENGINE_POD}", "condition=Ready", 300)
