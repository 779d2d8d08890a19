"""Who calls the admin port in the tests of its errors: the Python library, and a program for Node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from google.protobuf.json_format import ParseDict

from conformance.runners import HERE, Reply, Runner, node_program
from stepwire.v1 import admin_service_pb2
from stepwire_client import CallError, Credentials
from stepwire_client.admin_client import AdminClient

# `call(method, request, token=, timeout_ms=)`; the method without its service.
AdminCall = Callable[..., Reply]
CALLERS = ("python", "node")
TIMEOUT_MS = 30_000
# No operation of any version.
UNKNOWN = "Nothing"


@contextmanager
def caller(name: str, target: str) -> Iterator[AdminCall]:
    """The call of this language, at this admin port."""
    if name == "python":
        yield lambda *args, **options: _python(target, *args, **options)
        return
    with Runner(name, [*node_program("@grpc/grpc-js"), str(HERE / "admin_node.mjs")], target) as runner:
        yield lambda *args, **options: _node(runner, *args, **options)


def _python(
    target: str, method: str, request: Mapping[str, Any], *, token: str = "", timeout_ms: int = TIMEOUT_MS
) -> Reply:
    with AdminClient(target, credentials=Credentials(token)) as client:
        rpc, message = client._channel.unary_unary(f"/stepwire.v1.AdminService/{UNKNOWN}"), b""
        if method != UNKNOWN:
            rpc = getattr(client.stub, method)
            message = ParseDict(request, getattr(admin_service_pb2, f"{method}Request")())
        try:
            return Reply([client.call(rpc, message, timeout_s=timeout_ms / 1000)], "OK")
        except CallError as error:
            violations = [{"field": one.field, "description": one.description} for one in error.details.violations]
            details = {"error_metadata": error.details.metadata, "field_violations": violations}
            return Reply([], error.code.name, error.message, error.reason, **details)


def _node(
    runner: Runner, method: str, request: Mapping[str, Any], *, token: str = "", timeout_ms: int = TIMEOUT_MS
) -> Reply:
    metadata = {"authorization": f"Bearer {token}"} if token else {}
    return runner.call(f"AdminService/{method}", request, metadata=metadata, timeout_ms=timeout_ms)
