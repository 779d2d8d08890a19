"""Changes under a steady load: no call fails, and every answer has the tokens that it has without the change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster_facts import Facts
from cluster_stack import ENGINE_MAP, ENGINES, FRONTEND_MAP, FRONTENDS, NUM_STREAMS, ClusterStack
from manifests import Manifest
from rollout_load import Answer, differences


@pytest.fixture(autouse=True)
def two_engines(stack: ClusterStack, facts: Facts) -> None:
    """With one engine nothing can be replaced unseen."""
    if not facts.has_dns:
        pytest.skip("without cluster DNS nobody finds the pods that come")
    stack.scale(2)


def check_unseen(stack: ClusterStack, undisturbed: list[Answer], change: Callable[[], None]) -> None:
    with stack.loaded() as answers:
        change()
    assert differences(answers, undisturbed) == []
    assert len(answers) >= NUM_STREAMS


def settings_of(workload: Manifest) -> str:
    """The name of the map that its pods read."""
    [container] = workload["spec"]["template"]["spec"]["containers"]
    return str(container["envFrom"][0]["configMapRef"]["name"])


def names_of(pods: list[Manifest]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def test_frontends_are_replaced_unseen(stack: ClusterStack, undisturbed: list[Answer]) -> None:
    before = names_of(stack.pods("frontend"))

    def change() -> None:
        stack.apply({FRONTEND_MAP: {"STEPWIRE_MAX_CONCURRENT_REQUESTS": "1000"}})
        stack.kubectl.rolled_out(FRONTENDS)

    check_unseen(stack, undisturbed, change)
    assert not before & names_of(stack.pods("frontend"))


def test_engines_are_replaced_unseen(stack: ClusterStack, undisturbed: list[Answer]) -> None:
    before = names_of(stack.pods("engine-core"))

    def change() -> None:
        stack.apply({ENGINE_MAP: {"STEPWIRE_LOG_STATS_INTERVAL_S": "11"}})
        stack.kubectl.rolled_out(ENGINES)

    check_unseen(stack, undisturbed, change)
    assert not before & names_of(stack.pods("engine-core"))


def test_a_roll_back_finds_the_settings_of_before(stack: ClusterStack, undisturbed: list[Answer]) -> None:
    before = settings_of(stack.kubectl.get(FRONTENDS))
    stack.apply({FRONTEND_MAP: {"STEPWIRE_MAX_CONCURRENT_REQUESTS": "1001"}})
    stack.kubectl.rolled_out(FRONTENDS)
    assert settings_of(stack.kubectl.get(FRONTENDS)) != before

    def change() -> None:
        stack.kubectl("rollout", "undo", FRONTENDS)
        stack.kubectl.rolled_out(FRONTENDS)

    check_unseen(stack, undisturbed, change)
    assert settings_of(stack.kubectl.get(FRONTENDS)) == before
    # What is applied from here on is what is there.
    stack.settings[FRONTEND_MAP]["STEPWIRE_MAX_CONCURRENT_REQUESTS"] = "1000"


def test_engines_come_and_go_unseen(stack: ClusterStack, undisturbed: list[Answer]) -> None:
    stack.scale(1)

    def change() -> None:
        stack.scale(2)
        stack.scale(1)

    check_unseen(stack, undisturbed, change)
    assert [pod["metadata"]["name"] for pod in stack.pods("engine-core")] == ["stepwire-engine-core-0"]


@pytest.mark.parametrize(("component", "workload"), [("frontend", FRONTENDS), ("engine-core", ENGINES)])
def test_a_pod_is_deleted_without_grace_unseen(
    stack: ClusterStack, undisturbed: list[Answer], component: str, workload: str
) -> None:
    def change() -> None:
        pod = stack.pods(component)[-1]["metadata"]["name"]
        stack.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
        stack.kubectl.rolled_out(workload)

    check_unseen(stack, undisturbed, change)
