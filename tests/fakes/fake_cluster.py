"""What fake_kubectl acts on: objects and pods in a file. Everything that a controller would do is done at once.

Knows the few rules that the suite asks for: policies, budgets, admission, restarts. A fault breaks one of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PODS = {"Deployment": "deployment", "StatefulSet": "statefulset"}
DEPLOYMENT_FIELDS = {
    "minReadySeconds", "progressDeadlineSeconds", "replicas", "revisionHistoryLimit", "selector", "strategy",
    "template",
}  # fmt: skip


class Refused(Exception):
    """What the server says to a request that it does not carry out."""


class FakeCluster:
    """One command reads it, acts on it and writes it back: commands that change it come one after the other."""

    def __init__(self, path: Path, namespace: str, faults: set[str], state: dict[str, Any]) -> None:
        self._path, self._namespace, self._faults, self._state = path, namespace, faults, state

    @classmethod
    def read(cls, path: Path, namespace: str, faults: set[str]) -> FakeCluster:
        empty: dict[str, Any] = {"namespaces": {}, "objects": {}, "pods": {}, "history": {}, "count": 0, "down": 0}
        return cls(path, namespace, faults, json.loads(path.read_text()) if path.exists() else empty)

    def write(self) -> None:
        # Renamed into place: two of them may run at the same time.
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(self._state))
        draft.replace(self._path)

    def add_namespace(self, name: str) -> None:
        if name in self._state["namespaces"]:
            raise Refused(f'namespaces "{name}" already exists')
        self._state["namespaces"][name] = {}

    def label(self, changes: list[str]) -> None:
        labels = self._labels()
        for change in changes:
            key, has_value, value = change.partition("=")
            if has_value:
                labels[key] = value
            else:
                labels.pop(key.removesuffix("-"))

    def _labels(self) -> dict[str, str]:
        labels: dict[str, str] = self._state["namespaces"][self._namespace]
        return labels

    def apply(self, item: dict[str, Any], *, is_dry: bool) -> str:
        metadata, name = item["metadata"], self._name(item)
        if metadata.get("namespace") != self._namespace:
            raise Refused(f"{name} is not in the namespace {self._namespace}")
        if item["kind"] == "Deployment" and (unknown := set(item["spec"]) - DEPLOYMENT_FIELDS):
            raise Refused(f"failed to create typed patch object: .spec.{unknown.pop()}: field not declared in schema")
        if item["kind"] == "Pod":
            self._admit(item)
        known = self._state["objects"].get(name)
        verdict = "created" if known is None else "unchanged" if known == item else "configured"
        if not is_dry:
            self._state["objects"][name] = item
            self._reconcile(item, known)
        return f"{name} {'configured' if 'restless' in self._faults and known else verdict}"

    def _admit(self, pod: dict[str, Any]) -> None:
        is_strict = self._labels().get("pod-security.kubernetes.io/enforce") == "restricted"
        if is_strict and not pod["spec"]["securityContext"]["runAsNonRoot"] and "admits-root" not in self._faults:
            raise Refused('pods is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true')

    def _reconcile(self, item: dict[str, Any], known: dict[str, Any] | None) -> None:
        """Pods of a workload: new ones where its template is new."""
        name = item["metadata"]["name"]
        if item["kind"] == "Pod":
            self._state["pods"][name] = self._pod(name, item["metadata"]["labels"])
        if item["kind"] not in PODS:
            return
        if known is None or known["spec"]["template"] != item["spec"]["template"]:
            if known is not None:
                self._state["history"].setdefault(name, []).append(known)
            for pod in self._pods_of(item):
                del self._state["pods"][pod]
        self._fill(item)

    def _fill(self, item: dict[str, Any]) -> None:
        pods, name = self._pods_of(item), item["metadata"]["name"]
        for pod in pods[item["spec"]["replicas"] :]:
            del self._state["pods"][pod]
        for number in range(len(pods), item["spec"]["replicas"]):
            self._state["count"] += 1
            pod = f"{name}-{number if item['kind'] == 'StatefulSet' else self._state['count']}"
            self._state["pods"][pod] = self._pod(pod, item["spec"]["template"]["metadata"]["labels"])
        self._state["down"] = 0
        has_engine = any(self._component(pod) == "engine-core" for pod in self._state["pods"].values())
        for pod in self._state["pods"].values():
            if self._component(pod) == "frontend":
                self._set_ready(pod, has_engine)

    def _pod(self, name: str, labels: dict[str, str]) -> dict[str, Any]:
        self._state["count"] += 1
        statuses = [{"restartCount": 0, "ready": True}]
        status = {"podIP": "10.0.0.1", "phase": "Running", "containerStatuses": statuses}
        metadata = {"name": name, "uid": str(self._state["count"]), "labels": labels}
        return {"metadata": metadata, "status": status}

    @staticmethod
    def _component(pod: dict[str, Any]) -> str:
        return str(pod["metadata"]["labels"].get("app.kubernetes.io/component", ""))

    @staticmethod
    def _set_ready(pod: dict[str, Any], is_ready: bool) -> None:
        pod["status"]["containerStatuses"][0]["ready"] = is_ready

    def _pods_of(self, item: dict[str, Any]) -> list[str]:
        return [name for name in self._state["pods"] if name.startswith(item["metadata"]["name"] + "-")]

    @staticmethod
    def _name(item: dict[str, Any]) -> str:
        return f"{PODS.get(item['kind'], item['kind'].lower())}/{item['metadata']['name']}"

    def get(self, what: list[str], selector: str) -> dict[str, Any]:
        if what == ["pods"]:
            key, _, value = selector.partition("=")
            return {
                "items": [pod for pod in self._state["pods"].values() if pod["metadata"]["labels"].get(key) == value]
            }
        if what[0] == "pod":
            pod: dict[str, Any] = self._state["pods"][what[1]]
            return pod
        if "/" in what[0]:
            found: dict[str, Any] = self._state["objects"][what[0]]
            return found
        lists: dict[str, list[Any]] = {"nodes": [{"status": {"allocatable": {"cpu": "2"}}}]}
        if "no-dns" not in self._faults:
            lists["services"] = [{"metadata": {"name": "kube-dns"}}]
        return {"items": lists.get(what[0], [])}

    def delete(self, what: list[str], manifests: str | None) -> None:
        if manifests is not None:
            for item in yaml.safe_load_all(manifests):
                del self._state["objects"][self._name(item)]
        elif what[0] == "namespace":
            del self._state["namespaces"][what[1]]
        else:
            del self._state["pods"][what[1]]
            self._fill_all()

    def _fill_all(self) -> None:
        for item in list(self._workloads()):
            self._fill(item)

    def _workloads(self) -> Iterator[dict[str, Any]]:
        return (item for item in self._state["objects"].values() if item["kind"] in PODS)

    def check(self, what: str, condition: str) -> None:
        """What does not hold never will: nothing here takes time, but for the restart of what hangs."""
        kind, _, name = what.partition("/")
        if kind != "pod":
            return
        pod = self._state["pods"][name]
        status = pod["status"]["containerStatuses"][0]
        if restarts := re.search(r"restartCount}=(\d+)$", condition):
            if pod.pop("hangs", False) and "never-restarts" not in self._faults:
                self._restart(pod)
            if "restarts-idle" in self._faults and self._component(pod) == "frontend" and not status["ready"]:
                self._restart(pod)
            holds = status["restartCount"] == int(restarts[1])
        else:
            holds = status["ready"] == (not condition.endswith("=false"))
        if not holds:
            raise Refused(f"timed out waiting for the condition on {what}")

    def _restart(self, pod: dict[str, Any]) -> None:
        pod["status"]["containerStatuses"][0]["restartCount"] += 1
        self._set_ready(pod, True)

    def signal(self, pod: str, number: int) -> None:
        if number == signal.SIGKILL:
            self._restart(self._state["pods"][pod])
        else:
            self._state["pods"][pod]["hangs"] = True
            self._set_ready(self._state["pods"][pod], False)

    def rollout(self, verb: str, what: str) -> None:
        if verb == "undo":
            item = self._state["history"][what.partition("/")[2]].pop()
            known, self._state["objects"][what] = self._state["objects"][what], item
            self._reconcile(item, known)
        else:
            self._fill_all()

    def scale(self, what: str, replicas: int) -> None:
        self._state["objects"][what]["spec"]["replicas"] = replicas
        self._fill(self._state["objects"][what])

    def evict(self, pod: str) -> None:
        if self._state["down"] and "evicts-all" not in self._faults:
            raise Refused("Cannot evict pod as it would violate the pod's disruption budget.")
        del self._state["pods"][pod]
        self._state["down"] = 1

    def can_connect(self, port: int) -> bool:
        """From the client, which reaches nothing before it has a policy of its own."""
        if "networkpolicy/stepwire-test-client" not in self._state["objects"]:
            return False
        if port in (9100, 9101):
            return self._labels().get("stepwire.io/monitoring") == "true"
        return port != 50061 or "open-engine" in self._faults
