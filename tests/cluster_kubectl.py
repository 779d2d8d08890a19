"""kubectl in the namespace of a test run: the one place from which a cluster is touched."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from manifests import Manifest

TIMEOUT_S = 60


class KubectlError(Exception):
    """A command line that failed, with what kubectl said."""

    def __init__(self, args: Sequence[str], said: str) -> None:
        super().__init__(f"kubectl {' '.join(args)}: {said.strip()}")
        self.said = said.strip()


class Kubectl:
    """`kubectl("get", "pods")` is its stdout; a failure raises KubectlError, a time-out TimeoutExpired."""

    def __init__(self, program: str, namespace: str) -> None:
        self.namespace = namespace
        self._program = program

    def command(self, *args: str) -> list[str]:
        """For those who start it themselves."""
        return [self._program, "--namespace", self.namespace, *args]

    def __call__(self, *args: str, stdin: str = "", timeout_s: float = TIMEOUT_S) -> str:
        done = subprocess.run(
            self.command(*args), input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise KubectlError(args, done.stderr or done.stdout)
        return done.stdout

    def get(self, *args: str) -> Any:
        """Objects as they are in the cluster."""
        return json.loads(self("get", *args, "--output", "json"))

    def items(self, *args: str) -> list[Manifest]:
        """Those of a list."""
        items: list[Manifest] = self.get(*args)["items"]
        return items

    def apply(self, text: str, *flags: str) -> list[str]:
        """A line for each object: what became of it."""
        return self("apply", *flags, "--filename", "-", stdin=text).splitlines()

    def wait(self, what: str, condition: str, timeout_s: int) -> None:
        """Until `condition` (condition=Ready, jsonpath=...) holds of `what`."""
        self("wait", what, f"--for={condition}", f"--timeout={timeout_s}s", timeout_s=timeout_s + TIMEOUT_S)

    def rolled_out(self, what: str, timeout_s: int = 300) -> None:
        """Until all of its pods are new and ready."""
        self("rollout", "status", what, f"--timeout={timeout_s}s", timeout_s=timeout_s + TIMEOUT_S)

    def execute(self, pod: str, *command: str, stdin: str = "", timeout_s: float = TIMEOUT_S) -> str:
        """What a command in a pod's first container prints."""
        return self("exec", "--stdin", pod, "--", *command, stdin=stdin, timeout_s=timeout_s)


def text_of(items: Iterable[Manifest]) -> str:
    """A stream of YAML documents."""
    return yaml.safe_dump_all(items, sort_keys=False)
