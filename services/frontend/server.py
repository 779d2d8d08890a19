"""The public gRPC server: which services it has, its health names, its reflection. Owner: the event loop.

Health of "" is the process and stays SERVING when engines are away, so that a pod is taken out of rotation and not
restarted; the services that need an engine are SERVING while at least one is.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import grpc.aio

from frontend.api.authorizing import AuthorizingInterceptor
from frontend.api.chat import ChatService
from frontend.api.counting import CountingInterceptor
from frontend.api.embedding import EmbeddingService
from frontend.api.generation import GenerationService
from frontend.api.malformed_requests import MalformedRequestInterceptor
from frontend.api.models import ModelService
from frontend.api.tokenization import TokenizationService
from frontend.api.tracing import TracingInterceptor
from frontend.llm_frontend import LLMFrontend
from frontend.metrics import FrontendMetrics
from stepwire import grpc_options, grpc_server
from stepwire.aio_health import AioHealth
from stepwire.listen_address import known_as
from stepwire.tls import TlsFiles
from stepwire.v1 import (
    chat_service_pb2,
    chat_service_pb2_grpc,
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    tokenization_service_pb2,
    tokenization_service_pb2_grpc,
)

_SERVICES = tuple(
    service
    for module in (
        generation_service_pb2,
        chat_service_pb2,
        embedding_service_pb2,
        tokenization_service_pb2,
        model_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)
SERVICE_NAMES = tuple(service.full_name for service in _SERVICES)
HEALTH_METHODS = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")


class PublicServer:
    """`bind`, `start`, `stop`; `health` is set from outside."""

    def __init__(
        self, frontend: LLMFrontend, metrics: FrontendMetrics, *, enable_reflection: bool, shares_port: bool = False
    ) -> None:
        compat = _load_compat() if frontend.settings.serves_vllm_compat else None
        services = [*_SERVICES, compat.SERVICE] if compat is not None else _SERVICES
        self._service_names = tuple(service.full_name for service in services)
        metrics.expect_methods((*_methods(services), *HEALTH_METHODS))
        self.health = AioHealth(self._service_names)
        self._server = grpc.aio.server(
            interceptors=[
                CountingInterceptor(metrics),
                TracingInterceptor(known_as(frontend.settings.host)),
                AuthorizingInterceptor(frontend.gate),
                MalformedRequestInterceptor(),
            ],
            options=grpc_options.SHARED_PUBLIC_SERVER if shares_port else grpc_options.PUBLIC_SERVER,
        )
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(frontend), self._server)
        chat_service_pb2_grpc.add_ChatServiceServicer_to_server(ChatService(frontend), self._server)
        embedding_service_pb2_grpc.add_EmbeddingServiceServicer_to_server(EmbeddingService(frontend), self._server)
        tokenization_service_pb2_grpc.add_TokenizationServiceServicer_to_server(
            TokenizationService(frontend), self._server
        )
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(frontend), self._server)
        if compat is not None:
            compat.add_to(self._server, frontend)
        self.health.add_to(self._server)
        if enable_reflection:
            grpc_server.enable_reflection(self._server, self._service_names)

    def bind(self, host: str, port: int, tls: TlsFiles | None = None) -> int:
        """Listen; returns the port. Raises BindError."""
        return grpc_server.bind(self._server, host, port, tls)

    async def start(self) -> None:
        """Answer from now on."""
        await self._server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """Whether an engine can be reached: the health of every public service."""
        for name in self._service_names:
            await self.health.set_serving(name, is_serving)

    async def stop(self, grace_s: float) -> None:
        """Close the listener; what still runs after the grace ends UNAVAILABLE. Watches end at once."""
        self.health.end_watches()
        await self._server.stop(grace_s)


def _load_compat() -> ModuleType:
    """Only where it is served: its messages are in a package that is optional."""
    return importlib.import_module("frontend.api.compat.vllm_engine")


def _methods(services: Iterable[Any]) -> Iterator[str]:
    return (f"/{service.full_name}/{method.name}" for service in services for method in service.methods)
