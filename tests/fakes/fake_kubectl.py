"""A kubectl with a cluster of its own in a file, for tests of the suite in tests/cluster.

Controllers act at once, pods are entries of a list, and what is run in the client's pod runs here, against the server
of FAKE_KUBECTL_TARGET. FAKE_KUBECTL_FAULTS are what the suite has to notice. Every command line is kept.
`kustomize` is the real program's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fakes.fake_cluster import FakeCluster, Refused

FAULTS = set(os.environ.get("FAKE_KUBECTL_FAULTS", "").split())
API_VERSIONS = (
    "apps/v1", "autoscaling/v2", "batch/v1", "custom.metrics.k8s.io/v1beta1", "networking.k8s.io/v1", "policy/v1",
    "rbac.authorization.k8s.io/v1", "v1",
)  # fmt: skip


def fail(said: str) -> NoReturn:
    sys.stderr.write(f"error: {said}\n")
    sys.exit(1)


def flags_of(args: list[str]) -> dict[str, str]:
    """`--name value` and `--name=value`."""
    flags = {}
    for place, word in enumerate(args):
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            following = args[place + 1] if place + 1 < len(args) else ""
            flags[name] = value if has_value or following.startswith("--") else following
    return flags


def words_of(args: list[str]) -> list[str]:
    """What is neither a flag nor the value of one."""
    taking = ("--namespace", "--output", "--selector", "--filename", "--raw")
    return [
        word
        for place, word in enumerate(args)
        if not word.startswith("--") and (place == 0 or args[place - 1] not in taking)
    ]


def show(value: object) -> None:
    sys.stdout.write((value if isinstance(value, str) else json.dumps(value)) + "\n")


def execute(cluster: FakeCluster, pod: str, command: list[str]) -> None:
    """Programs of a pod, told apart by what they are made of."""
    text = " ".join(command)
    if "rollout_load.py" in text:
        options = command[command.index("--streams") :]
        program = Path(__file__).parent.parent / "rollout_load.py"
        target = os.environ["FAKE_KUBECTL_TARGET"]
        sys.exit(subprocess.run([sys.executable, str(program), "--target", target, *options], check=False).returncode)
    if command[0] == "stepwire":
        show("there was a test")
    elif "create_connection" in text:
        show("open" if cluster.can_connect(int(command[-1])) else "closed")
    elif "os.kill" in text:
        cluster.signal(pod, int(command[-1]))
    elif "touch" in text:
        show("\n".join(command[3:] if "writable" in FAULTS else ["/var/cache/stepwire"]))
    else:
        fail(f"no such program in a pod: {command[:2]}")


def create(cluster: FakeCluster, words: list[str], flags: dict[str, str]) -> None:
    if "--raw" in flags:
        assert json.load(sys.stdin)["kind"] == "Eviction"
        cluster.evict(flags["--raw"].split("/")[-2])
    else:
        cluster.add_namespace(words[2])


def forward(words: list[str]) -> None:
    """The port that is asked for, or any that is free, leads to the server; until it is told to end."""
    from fakes.forwarded_port import serve

    serve(int(words[2].partition(":")[0] or 0), os.environ["FAKE_KUBECTL_TARGET"])


def apply(cluster: FakeCluster, flags: dict[str, str]) -> None:
    items = [item for item in yaml.safe_load_all(sys.stdin.read()) if item]
    for item in items:
        show(cluster.apply(item, is_dry="--dry-run" in flags))


def answer(cluster: FakeCluster, args: list[str]) -> None:
    """One command line, without `--namespace NAME` in front of it."""
    words, flags = words_of(args), flags_of(args)
    match words[0]:
        case "version":
            show({"serverVersion": {"gitVersion": "v1.32.0"}})
        case "api-versions":
            show("\n".join(API_VERSIONS))
        case "get":
            show(cluster.get(words[1:], flags.get("--selector", "")))
        case "create":
            create(cluster, words, flags)
        case "label":
            cluster.label(words[3:])
        case "delete":
            cluster.delete(words[1:], None if "--filename" not in flags else sys.stdin.read())
        case "apply":
            apply(cluster, flags)
        case "wait":
            cluster.check(words[1], flags["--for"])
        case "rollout":
            cluster.rollout(words[1], words[2])
        case "scale":
            cluster.scale(words[1], int(flags["--replicas"]))
        case "logs":
            show('{"message": "Traceback"}' if "stack-trace" in FAULTS else '{"message": "ready"}')
        case verb:
            fail(f"unknown command {verb}")


def main() -> None:
    directory = Path(os.environ["FAKE_KUBECTL_STATE"])
    args = sys.argv[1:]
    if args[0] == "kustomize":
        sys.exit(subprocess.run([os.environ["FAKE_KUBECTL_REAL"], *args], check=False).returncode)
    with (directory / "commands").open("a", encoding="utf-8") as log:
        log.write(json.dumps(args) + "\n")
    namespace, args = args[1], args[2:]
    if args[0] == "port-forward":
        return forward(args)
    cluster = FakeCluster.read(directory / "cluster.json", namespace, FAULTS)
    try:
        if args[0] == "exec":
            rest: Any = args[args.index("--") + 1 :]
            execute(cluster, args[args.index("--") - 1], rest)
        else:
            answer(cluster, args)
    except Refused as refused:
        fail(str(refused))
    cluster.write()
    return None


if __name__ == "__main__":
    main()
