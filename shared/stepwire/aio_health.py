"""grpc.health.v1 for asyncio servers. Owner: the event loop; answers come from cached state and never ask anybody.

Names are "" (the process) and each full service name. An unknown name is NOT_FOUND for Check and SERVICE_UNKNOWN for
Watch. An open Watch would hold `server.stop(grace)` for the whole grace, so draining ends them first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

_Status = health_pb2.HealthCheckResponse


class AioHealth(health.aio.HealthServicer):  # type: ignore[misc, name-defined]  # the package has no types
    """The health service of one asyncio server. `service_names` start NOT_SERVING, the process itself SERVING."""

    def __init__(self, service_names: Iterable[str]) -> None:
        super().__init__()
        self._end_watches = asyncio.Event()
        for name in service_names:
            self._server_status[name] = _Status.NOT_SERVING

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    async def set_serving(self, service_name: str, is_serving: bool) -> None:
        """Change one answer and tell its watchers; without effect once a shutdown has begun."""
        await self.set(service_name, _Status.SERVING if is_serving else _Status.NOT_SERVING)

    async def Watch(  # noqa: N802  the name of the RPC
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        """Stream changes until the client goes or `end_watches` is called; then the stream ends with OK."""
        watching = asyncio.ensure_future(super().Watch(request, context))
        ending = asyncio.ensure_future(self._end_watches.wait())
        try:
            done, _ = await asyncio.wait({watching, ending}, return_when=asyncio.FIRST_COMPLETED)
            if watching in done:
                await watching
        finally:
            ending.cancel()
            watching.cancel()

    def end_watches(self) -> None:
        """End all open and future Watch streams."""
        self._end_watches.set()
