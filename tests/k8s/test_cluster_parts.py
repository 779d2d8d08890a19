"""Parts of the suite for clusters that no fake kubectl runs: programs of pods, names, images, detection."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

import cluster_manifests
import cluster_stack
from cluster_facts import detect, why_unreachable
from cluster_kubectl import KubectlError
from cluster_options import Options, new_namespace
from free_ports import free_port
from manifests import Manifest, of_kind, pod_of, workloads

OPTIONS = Options.from_environment({})


def python(program: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_the_client_tells_open_ports_from_closed_ones():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert python(cluster_stack._CONNECT, "127.0.0.1", str(server.getsockname()[1])) == "open"
    assert python(cluster_stack._CONNECT, "127.0.0.1", str(free_port())) == "closed"


def test_a_signal_reaches_the_process_of_a_module_and_no_other():
    # Something that runs until it is ended, as `python -m module`.
    program = "print('up', flush=True); import signal; signal.pause()"
    command = [sys.executable, "-m", "timeit", "-n", "1", "-r", "1", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "up\n"
            python(cluster_stack._SIGNAL, "engine_core_of_nobody", str(int(signal.SIGKILL)))
            assert other.poll() is None
            python(cluster_stack._SIGNAL, "timeit", str(int(signal.SIGKILL)))
            assert other.wait(60) == -signal.SIGKILL
        finally:
            other.kill()


def test_no_two_runs_share_a_namespace():
    assert len({new_namespace() for _ in range(20)}) == 20


def test_an_overlay_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="OVERLAY: there is no kustomization"):
        Options.from_environment({"OVERLAY": "k8s/overlays/huge"})


def test_nothing_lies_outside_the_namespace_of_the_run():
    items = cluster_manifests.namespaced(cluster_manifests.rendered(OPTIONS))
    assert {item["metadata"]["namespace"] for item in items} == {OPTIONS.namespace}
    assert not of_kind(items, *cluster_manifests.CLUSTER_WIDE)
    labels = cluster_manifests.namespace_labels(cluster_manifests.rendered(OPTIONS))
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_images_have_the_prefix_and_the_tag_of_the_run():
    options = Options.from_environment({"IMAGE_PREFIX": "registry.example:5000/me", "IMAGE_TAG": "2.0.0"})
    images = cluster_manifests.images_of(cluster_manifests.rendered(options))
    assert images == [
        "registry.example:5000/me/engine-core:2.0.0-embedded",
        "registry.example:5000/me/frontend:2.0.0",
    ]
    assert cluster_manifests.images_of(cluster_manifests.rendered(OPTIONS)) == [
        "stepwire/engine-core:0.1.0-embedded",
        "stepwire/frontend:0.1.0",
    ]


def test_a_changed_setting_gives_pods_another_map():
    def map_of(settings: dict[str, dict[str, str]]) -> str:
        [frontend] = of_kind(cluster_manifests.rendered(OPTIONS, settings=settings), "Deployment")
        return str(pod_of(frontend)["containers"][0]["envFrom"][0]["configMapRef"]["name"])

    assert map_of({}) != map_of({"stepwire-frontend-env": {"STEPWIRE_LOG_LEVEL": "WARNING"}})


def test_signals_reach_the_processes_of_pods_because_they_are_not_the_first_of_their_list():
    items = cluster_manifests.shown_to_signals(cluster_manifests.rendered(OPTIONS))
    assert [pod_of(item)["shareProcessNamespace"] for item in workloads(items)] == [True, True]


def test_the_client_is_a_pod_that_restricted_admission_takes_and_its_root_variant_is_not():
    items = cluster_manifests.rendered(OPTIONS)
    _, pod = cluster_manifests.client_objects(items, OPTIONS.namespace)
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert cluster_manifests.root_pod(items, OPTIONS.namespace)["spec"]["securityContext"]["runAsUser"] == 0


class Answers:
    """A kubectl that says what it was given; what is not there fails."""

    namespace = "stepwire-test-0"

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __call__(self, *args: str, **_: object) -> str:
        name = args[0].replace("-", "_")
        if name not in self._answers:
            raise KubectlError(args, "E1130 memcache.go\nThe connection to the server was refused")
        return str(self._answers[name])

    def items(self, *args: str) -> list[Manifest]:
        if args[0] not in self._answers:
            raise KubectlError(args, f"{args[0]} is forbidden")
        items: list[Manifest] = self._answers[args[0]]
        return items


VERSION = json.dumps({"clientVersion": {}, "serverVersion": {"gitVersion": "v1.31.2"}})


def test_what_a_cluster_has_is_detected():
    storage = {"metadata": {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}}
    rich = Answers(
        version=VERSION,
        api_versions="v1\napps/v1\ncustom.metrics.k8s.io/v1beta1\n",
        nodes=[{"status": {"allocatable": {"nvidia.com/gpu": "1"}}}, {"status": {}}],
        storageclasses=[{"metadata": {}}, storage],
        services=[{"metadata": {"name": "kube-dns"}}],
    )
    facts = detect(rich)  # type: ignore[arg-type]
    assert str(facts) == "Kubernetes v1.31.2, 2 nodes, DNS, default storage class, GPU, metrics of pods"
    assert facts.missing([{"apiVersion": "keda.sh/v1alpha1"}, {"apiVersion": "apps/v1"}]) == ["keda.sh/v1alpha1"]
    poor = detect(Answers(version=VERSION, api_versions="v1"))  # type: ignore[arg-type]
    assert str(poor) == "Kubernetes v1.31.2, 0 nodes, no DNS, no default storage class, no GPU, no metrics of pods"


def test_why_no_server_answers_is_told():
    assert why_unreachable(Answers(version=VERSION)) == ""  # type: ignore[arg-type]
    silent = why_unreachable(Answers())  # type: ignore[arg-type]
    assert silent == "no Kubernetes API server answers: The connection to the server was refused"
    assert "no serverVersion" in why_unreachable(Answers(version='{"clientVersion": {}}'))  # type: ignore[arg-type]
