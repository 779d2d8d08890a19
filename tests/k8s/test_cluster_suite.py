"""The suite for clusters at work on a cluster that is a fake: every test of it passes there, and notices what is wrong.

That proves nothing of real controllers, kubelets and networks, only that the suite asks them and understands them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from checkout import ROOT
from fakes import fake_public_server
from fakes.fake_public_server import FakePublicServer
from skips import require_program

pytestmark = pytest.mark.slow

TIMEOUT_S = 250
TESTS = ROOT / "tests"
VERDICTS = {"failure": "fail", "error": "error", "skipped": "skip"}
# Breaks of the fake cluster -> the test that has to notice.
FAULTS = {
    "restless": "test_a_second_apply_changes_nothing",
    "admits-root": "test_admission_refuses_a_pod_of_root",
    "open-engine": "test_a_client_reaches_the_frontend_and_not_the_engine",
    "evicts-all": "test_a_second_eviction_is_refused_while_one_pod_is_down",
    "never-restarts": "test_an_engine_that_hangs_is_not_ready_and_then_restarted",
    "restarts-idle": "test_without_an_engine_no_frontend_is_ready_and_none_is_restarted",
    "stack-trace": "test_every_line_is_json_and_none_has_a_stack_trace",
    "writable": "test_the_root_file_system_can_not_be_written",
}


@dataclass(frozen=True)
class Run:
    """How a run of the suite ended. `verdicts`: test -> pass, skip, fail, or error where it could not begin."""

    code: int
    said: str
    verdicts: dict[str, str]

    @property
    def failed(self) -> set[str]:
        return {name for name, verdict in self.verdicts.items() if verdict == "fail"}


class Suite:
    """tests/cluster with the fake kubectl on PATH."""

    def __init__(self, directory: Path, target: str) -> None:
        self.directory = directory
        self._target = target
        self.real = require_program("kubectl", how="kubectl 1.27 or newer, which renders without a cluster")
        (directory / "bin").mkdir()
        program = directory / "bin" / "kubectl"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fakes.fake_kubectl "$@"\n')
        program.chmod(0o755)

    def run(self, *args: str, **variables: str) -> Run:
        (self.directory / "cluster.json").unlink(missing_ok=True)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("STEPWIRE_")},
            "PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(TESTS),
            "FAKE_KUBECTL_STATE": str(self.directory),
            "FAKE_KUBECTL_TARGET": self._target,
            "FAKE_KUBECTL_REAL": self.real,
            **variables,
        }
        report = self.directory / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS / "cluster")]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *args],
            env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        return Run(done.returncode, done.stdout + done.stderr, verdicts(report))

    def commands(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.directory / "commands").read_text().splitlines()]


def verdicts(report: Path) -> dict[str, str]:
    """Of a JUnit file."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        names = {child.tag for child in case}
        found[case.attrib["name"]] = (
            "fail" if names & {"failure", "error"} else "skip" if "skipped" in names else "pass"
        )
    return found


@pytest.fixture
def server() -> Iterator[FakePublicServer]:
    with fake_public_server.running() as fake:
        yield fake


@pytest.fixture
def suite(tmp_path: Path, server: FakePublicServer) -> Suite:
    return Suite(tmp_path, server.target)


def test_the_whole_suite_passes_and_leaves_nothing_behind(suite: Suite) -> None:
    # Of the builds a few: that one of them can be rendered is tested elsewhere.
    run = suite.run("-k", "not would_take or gpu or hpa or pod-monitor")
    assert run.code == 0, run.said
    skipped = {name for name, verdict in run.verdicts.items() if verdict == "skip"}
    assert all("test_the_server_would_take" in name for name in skipped)
    assert "this cluster has no monitoring.coreos.com/v1" in run.said
    assert re.search(r"^Kubernetes v1.32.0, 1 nodes, DNS, no default storage class", run.said, re.MULTILINE)
    assert re.search(r"^test_frontends_are_replaced_unseen +\d+\.\d s  pass$", run.said, re.MULTILINE)
    assert json.loads((suite.directory / "cluster.json").read_text())["namespaces"] == {}
    check_commands(suite)


def check_commands(suite: Suite) -> None:
    """All commands stay in the one namespace, and each is one that the real kubectl understands."""
    commands = suite.commands()
    assert {command[0] for command in commands} == {"--namespace"}
    assert len({command[1] for command in commands}) == 1
    assert re.fullmatch(r"stepwire-test-[0-9a-f]{8}", commands[0][1])
    # One of each shape: names and numbers aside.
    shapes = {tuple(re.sub(r"[\d-]+|/.*", "", word) for word in command[2:6]): command for command in commands}
    assert len(shapes) > 15
    for command in shapes.values():
        said = told_to_nobody(suite.real, command)
        assert "refused" in said, f"{command}: {said}"


def told_to_nobody(program: str, command: list[str]) -> str:
    """What the real kubectl says when there is no server: that, unless it does not even understand the command."""
    pod = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": []}})
    nowhere = [program, "--server=http://127.0.0.1:9", *command[2:]]
    return subprocess.run(nowhere, input=pod, capture_output=True, text=True, timeout=60, check=False).stderr


def test_a_command_that_kubectl_does_not_understand_is_told_apart() -> None:
    real = require_program("kubectl", how="kubectl 1.27 or newer, which renders without a cluster")
    assert "refused" in told_to_nobody(real, ["--namespace", "a", "wait", "pod/a", "--for=condition=Ready"])
    assert "refused" not in told_to_nobody(real, ["--namespace", "a", "wait", "pod/a", "--for=restartCount=1"])
    assert "refused" not in told_to_nobody(real, ["--namespace", "a", "delete", "pod", "a", "--graceful=0"])


def test_each_fault_is_noticed_by_its_test(suite: Suite) -> None:
    run = suite.run("-k", " or ".join(FAULTS.values()), FAKE_KUBECTL_FAULTS=" ".join(FAULTS))
    assert run.code == 1, run.said
    assert {name.partition("[")[0] for name in run.verdicts} == set(FAULTS.values())
    assert run.failed == set(run.verdicts)


def test_a_run_does_what_it_is_told_and_without_cluster_dns_frontends_are_told_addresses(suite: Suite) -> None:
    passed_on, prefix = suite.directory / "passed-on", suite.directory
    told = {"KEEP": "1", "IMAGE_TAG": "7.8.9", "IMAGE_PREFIX": str(prefix), "IMAGE_LOAD": "touch"}
    told |= {"RENDER": f"tee -a {passed_on}", "FAKE_KUBECTL_FAULTS": "no-dns"}
    run = suite.run("-k", "second_apply or frontends_are_replaced", **told)
    assert run.code == 0, run.said
    assert "without cluster DNS nobody finds the pods that come" in run.said
    assert sorted(run.verdicts.values()) == ["pass", "skip"]
    # The images have been given to IMAGE_LOAD, and what RENDER passed on names them.
    for image in ("frontend:7.8.9", "engine-core:7.8.9-embedded"):
        assert (prefix / image).exists()
        assert f"image: {prefix}/{image}\n" in passed_on.read_text()
    cluster = json.loads((suite.directory / "cluster.json").read_text())
    maps = [item["data"] for name, item in cluster["objects"].items() if "stepwire-frontend-env" in name]
    assert maps[-1]["STEPWIRE_ENGINE_ENDPOINTS"] == "10.0.0.1:50061"
    # KEEP
    assert len(cluster["namespaces"]) == 1


def test_without_a_server_everything_is_skipped_and_that_can_be_a_failure(tmp_path: Path) -> None:
    real = require_program("kubectl", how="kubectl 1.27 or newer, which renders without a cluster")
    nowhere = {"PATH": f"{Path(real).parent}:{os.environ['PATH']}", "KUBECONFIG": str(tmp_path / "none")}
    suite = Suite(tmp_path, "")
    skipped = suite.run("-k", "admission or second_apply", **nowhere)
    assert (skipped.code, set(skipped.verdicts.values())) == (0, {"skip"})
    assert "no Kubernetes API server answers" in skipped.said
    required = suite.run("-k", "second_apply", STEPWIRE_REQUIRE_CLUSTER="1", **nowhere)
    assert required.code == 1
    assert "skipped under STEPWIRE_REQUIRE_CLUSTER=1: no Kubernetes API server answers" in required.said


def test_make_hands_its_variables_on() -> None:
    make = shutil.which("make")
    assert make is not None
    command = [make, "--dry-run", "test-cluster", "IMAGE_TAG=1.2.3", "KEEP=1", "RENDER=tee x"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    for part in ('OVERLAY="k8s/overlays/test"', 'IMAGE_TAG="1.2.3"', 'KEEP="1"', 'RENDER="tee x"', "tests/cluster"):
        assert part in said
