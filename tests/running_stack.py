"""Engine core and frontend as real processes with the real model, as an operator runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stepwire.v1 import (
    chat_service_pb2_grpc,
    embedding_service_pb2_grpc,
    generation_service_pb2_grpc,
    model_service_pb2_grpc,
    tokenization_service_pb2_grpc,
)

START_TIMEOUT_S = 120.0
GENERATION = "stepwire.v1.GenerationService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Service:
    """One process, its log, and the ports it says it has."""

    port = 0
    metrics_port = 0
    # Frontends only.
    admin_port = 0

    def __init__(self, package: str, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", package, "--metrics-port", "0", *flags],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._has_ports = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self._has_ports.wait(START_TIMEOUT_S)
        assert self.port, "".join(self.log)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"[ :](\d+), metrics on (?:port |\S+:)(\d+)", line):
                if admin := re.search(r"admin on \S+:(\d+)", line):
                    self.admin_port = int(admin[1])
                self.port, self.metrics_port = int(found[1]), int(found[2])
                self._has_ports.set()
        self._has_ports.set()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        code = self.process.wait(60)
        self._reader.join(60)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code

    def metric(self, name: str) -> float:
        """Sum of a series over its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as response:
            lines = response.read().decode().splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}(\{{| )", line)]
        assert values, f"no series {name}"
        return sum(values)


class Frontend(Service):
    """A frontend and stubs to call it."""

    def __init__(
        self,
        *engine_ports: int,
        cache_dir: Path,
        port: int = 0,
        http_port: int = 0,
        flags: tuple[str, ...] = (),
        package: str = "frontend",
    ) -> None:
        endpoints = ",".join(f"127.0.0.1:{port}" for port in engine_ports)
        super().__init__(
            package,
            "--port",
            str(port),
            "--admin-port",
            "0",
            "--http-port",
            str(http_port),
            "--engine-endpoints",
            endpoints,
            "--cache-dir",
            str(cache_dir),
            *flags,
        )
        self.channel = self.new_channel()
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def new_channel(self) -> grpc.Channel:
        return grpc.insecure_channel(f"127.0.0.1:{self.port}", options=[("grpc.use_local_subchannel_pool", 1)])

    def wait_for_health(self, status: int) -> None:
        watch = self.health.Watch(health_pb2.HealthCheckRequest(service=GENERATION), timeout=START_TIMEOUT_S)
        while next(watch).status != status:
            pass
        watch.cancel()

    @property
    def generation(self) -> generation_service_pb2_grpc.GenerationServiceStub:
        return generation_service_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def chat(self) -> chat_service_pb2_grpc.ChatServiceStub:
        return chat_service_pb2_grpc.ChatServiceStub(self.channel)

    @property
    def embedding(self) -> embedding_service_pb2_grpc.EmbeddingServiceStub:
        return embedding_service_pb2_grpc.EmbeddingServiceStub(self.channel)

    @property
    def models(self) -> model_service_pb2_grpc.ModelServiceStub:
        return model_service_pb2_grpc.ModelServiceStub(self.channel)

    @property
    def tokenization(self) -> tokenization_service_pb2_grpc.TokenizationServiceStub:
        return tokenization_service_pb2_grpc.TokenizationServiceStub(self.channel)


class Stack:
    """Starts services and kills at the end what still runs."""

    def __init__(self, model_dir: Path, cache_dir: Path, exit_stack: ExitStack) -> None:
        self._model_dir = model_dir
        self._cache_dir = cache_dir
        self._exit_stack = exit_stack

    def engine(self, *flags: str, port: int = 0, package: str = "engine_core") -> Service:
        """`package` may be a faulty engine of tests/fakes instead of the real one."""
        return self._keep(Service(package, "--port", str(port), "--model", str(self._model_dir), *flags))

    def frontend(
        self,
        *engines: Service,
        port: int = 0,
        http_port: int = 0,
        flags: tuple[str, ...] = (),
        package: str = "frontend",
    ) -> Frontend:
        """`package` may be an unwell frontend of tests/fakes instead of the real one."""
        ports = (engine.port for engine in engines)
        frontend = Frontend(
            *ports, cache_dir=self._cache_dir, port=port, http_port=http_port, flags=flags, package=package
        )
        self._exit_stack.callback(frontend.channel.close)
        return self._keep(frontend)

    def _keep(self, service: Service) -> Service:
        self._exit_stack.callback(service.kill)
        return service


@contextmanager
def running_stack(model_dir: Path, cache_dir: Path) -> Iterator[Stack]:
    with ExitStack() as exit_stack:
        yield Stack(model_dir, cache_dir, exit_stack)


def greedy_by_default(model_dir: Path, directory: Path) -> Path:
    """The model, in an empty directory, with temperature 0 for requests that ask for none."""
    for file in model_dir.iterdir():
        (directory / file.name).symlink_to(file)
    config = directory / "generation_config.json"
    content = {**json.loads(config.read_text(encoding="utf-8")), "temperature": 0}
    config.unlink()
    config.write_text(json.dumps(content), encoding="utf-8")
    return directory


def wait_for_metric(service: Service, name: str, value: float, within_s: float = 30.0) -> None:
    """Looks at the sum of a series until it has this value: the engine publishes after its step.

    Raises AssertionError with the last value after `within_s` seconds.
    """
    give_up, pause = time.monotonic() + within_s, threading.Event()
    while (found := service.metric(name)) != value:
        assert time.monotonic() < give_up, f"{name} is still {found} and not {value} after {within_s} s"
        pause.wait(0.05)


def wait_until_zero(service: Service, name: str, within_s: float = 30.0) -> None:
    """The same for 0. A request that nobody has ended must be long enough to run for more than `within_s` seconds."""
    wait_for_metric(service, name, 0, within_s)
