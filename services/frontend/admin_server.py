"""The admin gRPC server: AdminService, health, reflection, on a port of their own. Owner: the event loop."""

from __future__ import annotations

import grpc.aio

from frontend.api.admin import AdminService
from frontend.api.authorizing import AuthorizingInterceptor
from frontend.api.counting import CountingInterceptor
from frontend.api.malformed_requests import MalformedRequestInterceptor
from frontend.drain import FrontendDrain
from frontend.llm_frontend import LLMFrontend
from frontend.metrics import FrontendMetrics
from frontend.peers import Peers
from stepwire import grpc_options, grpc_server
from stepwire.aio_health import AioHealth
from stepwire.tls import TlsFiles
from stepwire.v1 import admin_service_pb2, admin_service_pb2_grpc

_SERVICE = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
SERVICE_NAME = _SERVICE.full_name
METHODS = tuple(f"/{SERVICE_NAME}/{method.name}" for method in _SERVICE.methods)


class AdminServer:
    """`bind`, `start`, `stop`; serves from start to stop, also while the frontend drains."""

    def __init__(
        self,
        frontend: LLMFrontend,
        drain: FrontendDrain,
        metrics: FrontendMetrics,
        peers: Peers,
        *,
        enable_reflection: bool,
    ) -> None:
        metrics.expect_methods(METHODS)
        self._health = AioHealth([SERVICE_NAME])
        self._server = grpc.aio.server(
            interceptors=[
                CountingInterceptor(metrics),
                AuthorizingInterceptor(frontend.gate, for_admin=True),
                MalformedRequestInterceptor(),
            ],
            options=grpc_options.SERVER,
        )
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminService(frontend.pool, drain, frontend.gate, peers), self._server
        )
        self._health.add_to(self._server)
        if enable_reflection:
            grpc_server.enable_reflection(self._server, [SERVICE_NAME])

    def bind(self, host: str, port: int, tls: TlsFiles | None = None) -> int:
        """Listen; returns the port. Raises BindError."""
        return grpc_server.bind(self._server, host, port, tls)

    async def start(self) -> None:
        """Answer from now on."""
        await self._server.start()
        await self._health.set_serving(SERVICE_NAME, is_serving=True)

    async def stop(self, grace_s: float) -> None:
        """Close the listener; calls that wait for engines end with it. Watches end at once."""
        self._health.end_watches()
        await self._server.stop(grace_s)
