"""The images as containers: what the manifests give their pods, on a network of their own, as an operator runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from manifests import Build, Manifest, containers_of, environment_of, pod_of, render, workloads
from skips import require_program
from stepwire.v1 import generation_service_pb2_grpc

# As `make test-images` calls them.
PREFIX = "localhost/stepwire-test"
BASE_IMAGE = f"{PREFIX}/base:bookworm"
# A host without a GPU.
OVERLAY = Build("overlays/cpu")
START_TIMEOUT_S = 180.0
CONFIGURATION = Path(__file__).parent / "containers" / "containers.conf"


def podman(*arguments: str, timeout_s: float = 60.0) -> str:
    """What the command prints. Raises AssertionError with what it complains of."""
    done = _podman(arguments, timeout_s)
    assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def _podman(arguments: tuple[str, ...], timeout_s: float) -> subprocess.CompletedProcess[str]:
    program = require_program("podman", how="make system-deps")
    environment = {"CONTAINERS_CONF": str(CONFIGURATION), **os.environ}
    return subprocess.run(
        [program, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def require_images() -> None:
    """Skips the test, saying what to do, where containers can not be run or the images are not there."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for networks between containers")
    for image in (BASE_IMAGE, *(image_of(manifest_of(name)) for name in ("frontend", "engine-core"))):
        if _podman(("image", "exists", image), 60.0).returncode != 0:
            pytest.skip(f"needs the image {image}: make test-images")


def manifest_of(name: str) -> Manifest:
    """The container `name` of the overlay."""
    containers = [container for workload in workloads(render(OVERLAY)) for container in containers_of(workload)]
    [container] = [container for container in containers if container["name"] == name]
    return container


def image_of(container: Manifest) -> str:
    """The image that stands for the one of the manifest."""
    return container["image"].replace("stepwire/", f"{PREFIX}/", 1)


@dataclass(frozen=True, slots=True)
class Container:
    """One of the two services; `service` is its name in the manifests."""

    name: str
    service: str
    port: int
    metrics_port: int
    # What its health service calls ready.
    health_service: str

    def run(self, network: str) -> None:
        """Start it with the variables, the memory limit and the mounts of its manifest; nothing else can be written."""
        container = manifest_of(self.service)
        variables = environment_of(render(OVERLAY), container) | {"STEPWIRE_ENGINE_ID": self.name}
        if self.service == "frontend":
            variables |= {"STEPWIRE_CLIENT_ID": self.name}
            del variables["STEPWIRE_ENGINE_ID"]
        podman(
            *("run", "--detach", "--name", self.name, "--network", network),
            *("--network-alias", f"stepwire-{self.service}"),
            *("--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
            *("--user", "10001:10001", "--memory", container["resources"]["limits"]["memory"].replace("i", "").lower()),
            *(word for mount in container["volumeMounts"] for word in ("--volume", mount["mountPath"])),
            *(word for name, value in variables.items() for word in ("--env", f"{name}={value}")),
            image_of(container),
        )

    def execute(self, *command: str) -> str:
        """What a command prints inside. Raises AssertionError when it fails."""
        return podman("exec", self.name, *command)

    def answers_probe(self, kind: str) -> bool:
        """Whether `stepwire-probe` inside says that the service is live, or ready."""
        command = ("exec", self.name, "stepwire-probe", kind, str(self.metrics_port))
        return _podman(command, 60.0).returncode == 0

    def inspect(self, template: str) -> str:
        return podman("inspect", "--format", template, self.name).strip()

    def log(self) -> str:
        """All that it has written so far."""
        done = _podman(("logs", self.name), 60.0)
        return done.stdout + done.stderr

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """From outside of the network; the address is another one after every start."""
        own = "import socket; print(socket.gethostbyname(socket.gethostname()))"
        address = self.execute("python", "-c", own).strip()
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"{address}:{self.port}", options=options) as channel:
            yield channel

    @contextmanager
    def health(self) -> Iterator[Iterator[bool]]:
        """Whether it says that it is ready: now, and whenever that changes; grpc.RpcError after START_TIMEOUT_S."""
        request = health_pb2.HealthCheckRequest(service=self.health_service)
        with self.channel() as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=START_TIMEOUT_S, wait_for_ready=True)
            yield (response.status == health_pb2.HealthCheckResponse.SERVING for response in watch)
            watch.cancel()

    def wait_for_health(self, is_ready: bool) -> None:
        """Until it says that it is ready, or that it is not. Raises grpc.RpcError after START_TIMEOUT_S."""
        with self.health() as statuses:
            assert is_ready in statuses

    @contextmanager
    def generation(self) -> Iterator[generation_service_pb2_grpc.GenerationServiceStub]:
        with self.channel() as channel:
            yield generation_service_pb2_grpc.GenerationServiceStub(channel)

    def wait_until_ended(self) -> int:
        """The exit code."""
        return int(podman("wait", self.name, timeout_s=START_TIMEOUT_S))


@contextmanager
def anonymous_container(*arguments: str) -> Iterator[str]:
    """The name of what `podman run` with these arguments has started."""
    name = podman("run", "--detach", *arguments).strip()
    try:
        yield name
    finally:
        podman("rm", "--force", "--volumes", "--time", "0", name)


@contextmanager
def stopping(container: Container) -> Iterator[None]:
    """`podman stop` runs while the block does: SIGTERM, and SIGKILL if the grace of its manifest is not enough."""
    [grace_s] = [
        pod_of(workload)["terminationGracePeriodSeconds"]
        for workload in workloads(render(OVERLAY))
        if container.service in {item["name"] for item in containers_of(workload)}
    ]
    with ThreadPoolExecutor(1) as executor:
        stop = executor.submit(podman, "stop", "--time", str(grace_s), container.name, timeout_s=grace_s + 30.0)
        yield
        stop.result()


@dataclass(frozen=True, slots=True)
class Pair:
    """An engine, and a frontend that finds it by its name."""

    engine: Container
    frontend: Container


def engine_container(name: str) -> Container:
    return Container(name, "engine-core", 50061, 9101, "stepwire.engine.v1.EngineCoreService")


def frontend_container(name: str) -> Container:
    return Container(name, "frontend", 50051, 9100, "stepwire.v1.GenerationService")


@contextmanager
def network_of_test() -> Iterator[str]:
    """The name of a network on which containers find each other by name."""
    require_images()
    name = f"stepwire-test-{os.getpid()}"
    podman("network", "create", name)
    try:
        yield name
    finally:
        podman("network", "rm", "--force", name)


@contextmanager
def running_pair() -> Iterator[Pair]:
    """Both, ready; what is left of them at the end is removed."""
    with network_of_test() as network, ExitStack() as exit_stack:
        engine, frontend = engine_container(f"{network}-engine"), frontend_container(f"{network}-frontend")
        for container in (engine, frontend):
            exit_stack.callback(podman, "rm", "--force", "--ignore", "--volumes", "--time", "0", container.name)
            container.run(network)
        for container in (engine, frontend):
            container.wait_for_health(True)
        yield Pair(engine, frontend)
