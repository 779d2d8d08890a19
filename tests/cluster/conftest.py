"""One namespace and one stack for a whole run; the order of the tests; the table at its end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

import cluster_manifests
from cluster_facts import Facts, detect, why_unreachable
from cluster_kubectl import Kubectl, text_of
from cluster_options import Options
from cluster_stack import ClusterStack
from cluster_table import Table
from rollout_load import Answer

# What only looks comes first, what kills comes late, and the logs of all of it last.
ORDER = ("server", "serving", "policies", "rollouts", "deaths", "logs")
TIMEOUT_S = 1800


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Table(), "cluster-table")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(item.path.stem.removeprefix("test_cluster_")))
    for item in items:
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def skip(options: Options, reason: str) -> None:
    if options.is_required:
        pytest.fail(f"skipped under STEPWIRE_REQUIRE_CLUSTER=1: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def options() -> Options:
    return Options.from_environment()


@pytest.fixture(scope="session")
def kubectl(options: Options) -> Kubectl:
    """Of a cluster that answers; nothing has been changed in it."""
    program = shutil.which("kubectl")
    if program is None:
        skip(options, "needs kubectl, which is not on PATH")
    kubectl = Kubectl(str(program), options.namespace)
    if reason := why_unreachable(kubectl):
        skip(options, reason)
    return kubectl


@pytest.fixture(scope="session")
def facts(kubectl: Kubectl, request: pytest.FixtureRequest) -> Facts:
    found = detect(kubectl)
    request.config.pluginmanager.get_plugin("cluster-table").title = str(found)
    return found


@pytest.fixture(scope="session")
def namespace(kubectl: Kubectl, options: Options) -> Iterator[str]:
    """Made for this run, as strict as the overlay's own, and gone behind it; one that is there already is an error."""
    labels = cluster_manifests.namespace_labels(cluster_manifests.rendered(options))
    kubectl("create", "namespace", options.namespace)
    try:
        kubectl("label", "namespace", options.namespace, *(f"{key}={value}" for key, value in labels.items()))
        yield options.namespace
    finally:
        if not options.keeps_namespace:
            kubectl("delete", "namespace", options.namespace, "--timeout=300s", timeout_s=360)


@pytest.fixture(scope="session")
def stack(namespace: str, options: Options, kubectl: Kubectl, facts: Facts) -> ClusterStack:
    stack = ClusterStack(options, kubectl, facts)
    options.load_images(cluster_manifests.images_of(stack.manifests()))
    stack.up()
    return stack


@pytest.fixture(scope="session")
def enforces_policies(stack: ClusterStack) -> bool:
    """Whether default-deny closes the client's egress, until it gets a policy of its own, which it has from here on."""
    address = stack.addresses("frontend", 50051).split(",")[0].rpartition(":")[0]
    is_open = stack.can_connect(address, 50051)
    stack.kubectl.apply(stack.options.filtered(text_of([cluster_manifests.client_policy(stack.namespace)])))
    return not is_open


@pytest.fixture(scope="session")
def undisturbed(stack: ClusterStack, enforces_policies: bool) -> list[Answer]:
    """What the load of every other test is compared with."""
    answers = stack.load()
    assert not any(answer.error for answer in answers)
    return answers
