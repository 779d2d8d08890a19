"""Health of the engine from cached state: the state machine and the monitor feed it, no probe ever waits for a step.

`""` is the process (liveness), the service's full name is readiness.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from engine_core.lifecycle import EngineState

_Status = health_pb2.HealthCheckResponse


class EngineHealth:
    """Answers for gRPC probes and for the HTTP ones of the metrics port."""

    def __init__(self, service_name: str) -> None:
        self._service_name = service_name
        # Non-blocking: a Watch must not hold a thread of the server for its whole life.
        self._servicer = health.HealthServicer(
            experimental_non_blocking=True, experimental_thread_pool=ThreadPoolExecutor(1, "health")
        )
        self.is_ready = False
        self.is_alive = True
        self._servicer.set("", _Status.SERVING)

    def add_to(self, server: grpc.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def on_state(self, state: EngineState) -> None:
        """Listener of the state machine."""
        # A paused engine holds requests, it does not refuse them.
        self.is_ready = state in (EngineState.RUNNING, EngineState.PAUSED)
        self._servicer.set(self._service_name, _Status.SERVING if self.is_ready else _Status.NOT_SERVING)
        if state is EngineState.DEAD:
            self.set_alive(False)

    def set_alive(self, is_alive: bool) -> None:
        """Liveness; False asks a supervisor for a restart."""
        if is_alive != self.is_alive:
            self.is_alive = is_alive
            self._servicer.set("", _Status.SERVING if is_alive else _Status.NOT_SERVING)
