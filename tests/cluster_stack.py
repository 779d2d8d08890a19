"""stepwire as a test run has it in a cluster, and a client beside it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import cluster_manifests
from cluster_facts import Facts
from cluster_kubectl import Kubectl, text_of
from cluster_manifests import CLIENT, ENGINE, FRONTEND, Settings
from cluster_options import Options
from manifests import Manifest
from rollout_load import Answer, parse_answers

NUM_STREAMS = 100
MAX_TOKENS = 32
START_TIMEOUT_S = 600
LOAD_TIMEOUT_S = 900
PYTHON = "/opt/venv/bin/python"
ENGINES, FRONTENDS = f"statefulset/{ENGINE}", f"deployment/{FRONTEND}"
FRONTEND_MAP, ENGINE_MAP = f"{FRONTEND}-env", f"{ENGINE}-env"
_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
    print("open")
except OSError:
    print("closed")
"""
_SIGNAL = """
import os, pathlib, sys
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        words, pid = path.read_bytes().split(b"\\0"), int(path.parent.name)
    except (FileNotFoundError, ProcessLookupError):
        # It has ended since it was listed.
        continue
    if pid != os.getpid() and words[1:3] == [b"-m", sys.argv[1].encode()]:
        os.kill(pid, int(sys.argv[2]))
"""


@dataclass
class ClusterStack:
    """What `up` has put there. Pods are those of a component: frontend or engine-core."""

    options: Options
    kubectl: Kubectl
    facts: Facts
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    num_engines: int = 1

    @property
    def namespace(self) -> str:
        return self.options.namespace

    def manifests(self) -> list[Manifest]:
        items = cluster_manifests.rendered(self.options, settings=self.settings)
        items = cluster_manifests.shown_to_signals(cluster_manifests.namespaced(items))
        for item in items:
            if item["kind"] == "StatefulSet":
                # Otherwise an apply would undo the last change of the scale.
                item["spec"]["replicas"] = self.num_engines
        return items

    def apply(self, settings: Settings | None = None) -> list[str]:
        """With some settings changed; a line for each object."""
        for name, variables in (settings or {}).items():
            self.settings.setdefault(name, {}).update(variables)
        return self.kubectl.apply(self.options.filtered(text_of(self.manifests())))

    def up(self) -> None:
        """Everything is there and ready, and so is the client."""
        self.apply()
        client = cluster_manifests.client_objects(self.manifests(), self.namespace)
        self.kubectl.apply(self.options.filtered(text_of(client)))
        if not self.facts.has_dns:
            self.kubectl.wait(ENGINES, "jsonpath={.status.replicas}=1", START_TIMEOUT_S)
            self.kubectl.wait(f"pod/{ENGINE}-0", "jsonpath={.status.phase}=Running", START_TIMEOUT_S)
            self.apply({FRONTEND_MAP: {"STEPWIRE_ENGINE_ENDPOINTS": self.addresses("engine-core", 50061)}})
        self.ready(START_TIMEOUT_S)
        self.kubectl.wait(f"pod/{CLIENT}", "condition=Ready", START_TIMEOUT_S)

    def ready(self, timeout_s: int = 300) -> None:
        for workload in (ENGINES, FRONTENDS):
            self.kubectl.rolled_out(workload, timeout_s)

    def pods(self, component: str) -> list[Manifest]:
        """Those that are not on their way out."""
        pods = self.kubectl.items("pods", "--selector", f"app.kubernetes.io/component={component}")
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def addresses(self, component: str, port: int) -> str:
        return ",".join(f"{pod['status']['podIP']}:{port}" for pod in self.pods(component))

    @property
    def target(self) -> str:
        """What a client in the cluster dials."""
        if self.facts.has_dns:
            return f"dns:///{FRONTEND}-headless.{self.namespace}:50051"
        return "ipv4:" + self.addresses("frontend", 50051)

    def can_connect(self, address: str, port: int) -> bool:
        """From the client's pod."""
        return self.kubectl.execute(CLIENT, PYTHON, "-c", _CONNECT, address, str(port)).strip() == "open"

    def signal(self, pod: str, module: str, number: int) -> None:
        """To the process `python -m module` of a pod."""
        self.kubectl.execute(pod, PYTHON, "-c", _SIGNAL, module, str(int(number)))

    def scale(self, num_engines: int) -> None:
        self.num_engines = num_engines
        self.kubectl("scale", ENGINES, f"--replicas={num_engines}")
        self.kubectl.rolled_out(ENGINES)

    def load(self) -> list[Answer]:
        """The answers of a load that nothing disturbs."""
        with self.loaded() as answers:
            pass
        return answers

    @contextmanager
    def loaded(self) -> Iterator[list[Answer]]:
        """A load from the client's pod while the block runs; its answers are in the list behind it."""
        program = [PYTHON, "/load/rollout_load.py", "--target", self.target]
        program += ["--streams", str(NUM_STREAMS), "--max-tokens", str(MAX_TOKENS)]
        command = self.kubectl.command("exec", "--stdin", CLIENT, "--", *program)
        answers: list[Answer] = []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
            try:
                yield answers
                # The end of its input ends the load.
                out, err = process.communicate("", timeout=LOAD_TIMEOUT_S)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == 0, err
        answers += parse_answers(out.splitlines())

    @contextmanager
    def forwarded(self, what: str, port: int) -> Iterator[int]:
        """A port of this host that leads to one of a pod or Service."""
        # One that is free by the word of the program: another program may have taken whatever was free before.
        command = self.kubectl.command("port-forward", what, f":{port}")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                # Told once it listens; an end of the output is an end of the program.
                told = re.match(r"Forwarding from 127.0.0.1:(\d+)", process.stdout.readline())
                assert told is not None, "kubectl port-forward did not start"
                yield int(told[1])
            finally:
                process.terminate()
