"""What probes make of processes that hang or die."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from cluster_stack import ClusterStack

ENGINE_POD = "stepwire-engine-core-0"
RESTARTS = "jsonpath={.status.containerStatuses[0].restartCount}"


@pytest.fixture
def restarts(stack: ClusterStack) -> Iterator[int]:
    """How often the first engine was restarted before; one engine, so that readiness is its alone."""
    stack.scale(1)
    yield int(stack.kubectl.get("pod", ENGINE_POD)["status"]["containerStatuses"][0]["restartCount"])
    stack.ready()


def test_an_engine_that_hangs_is_not_ready_and_then_restarted(stack: ClusterStack, restarts: int) -> None:
    stack.signal(ENGINE_POD, "engine_core", signal.SIGSTOP)
    stack.kubectl.wait(f"pod/{ENGINE_POD}", "condition=Ready=false", 60)
    # Six failures of liveness, and the grace of a process that does not hear SIGTERM.
    stack.kubectl.wait(f"pod/{ENGINE_POD}", f"{RESTARTS}={restarts + 1}", 240)
    stack.kubectl.wait(f"pod/{ENGINE_POD}", "condition=Ready", 300)


def test_without_an_engine_no_frontend_is_ready_and_none_is_restarted(stack: ClusterStack) -> None:
    before = {pod["metadata"]["uid"] for pod in stack.pods("frontend")}
    stack.kubectl("scale", "statefulset/stepwire-engine-core", "--replicas=0")
    try:
        for pod in stack.pods("frontend"):
            stack.kubectl.wait(f"pod/{pod['metadata']['name']}", "condition=Ready=false", 120)
        assert {pod["metadata"]["uid"] for pod in stack.pods("frontend")} == before
    finally:
        stack.scale(1)
        stack.ready()


def test_an_engine_that_is_killed_comes_back(stack: ClusterStack, restarts: int) -> None:
    stack.signal(ENGINE_POD, "engine_core", signal.SIGKILL)
    stack.kubectl.wait(f"pod/{ENGINE_POD}", f"{RESTARTS}={restarts + 1}", 120)
    stack.kubectl.wait(f"pod/{ENGINE_POD}", "condition=Ready", 300)
