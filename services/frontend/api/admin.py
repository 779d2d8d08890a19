"""stepwire.v1.AdminService: operations on engines, and on this frontend itself. For operators, on a port of its own.

Every engine operation is the same fan-out: the arguments of the request go to each engine that is meant, and the
response holds what each of them answered. Nothing here knows what an operation does.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import Message

from frontend.access.gate import Gate
from frontend.api.answering import Context, Rpc, answers_errors, caller_of
from frontend.drain import FrontendDrain
from frontend.engine_client.fan_out import call_engines, drain_engines
from frontend.engine_client.pool import EnginePool
from frontend.engine_client.utility_calls import is_error
from frontend.peers import Peers
from stepwire.errors import InvalidRequestError
from stepwire.v1 import admin_service_pb2 as pb
from stepwire.v1 import admin_service_pb2_grpc as pb_grpc
from stepwire.v1 import control_pb2

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 200
MAX_LOGGED_CHARS = 1000
MAX_NAME_CHARS = 80


def _without_data(message: Message, indent: int, as_one_line: bool) -> str | None:
    """Weights are nothing for a log, and as text they would hold up the event loop."""
    if not isinstance(message, control_pb2.UpdateWeightsArgs.Tensor):
        return None
    return f"{len(message.data)} bytes of {message.name[:MAX_NAME_CHARS]}"


def _audited(rpc: Rpc[Any, Any, Any]) -> Rpc[Any, Any, Any]:
    """Log who calls what, with which arguments, before anything happens."""
    answered = answers_errors(rpc)

    @functools.wraps(rpc)
    async def audited(self: AdminService, request: Message, context: Context) -> Any:
        text = text_format.MessageToString(request, as_one_line=True, message_formatter=_without_data)
        arguments = text[:MAX_LOGGED_CHARS]
        name = request.DESCRIPTOR.name.removesuffix("Request")
        logger.info("admin call %s by %s: {%s}", name, self.caller(context), arguments)
        return await answered(self, request, context)

    return audited


def _fan_out(response_type: type[Any]) -> Any:
    """The RPC that asks engines and answers with this response."""

    @_audited
    async def rpc(self: AdminService, request: Any, context: Context) -> Any:
        outcomes = await self.call_engines(request.args, request.engines.engine_ids, context)
        response = response_type()
        for engine_id, outcome in outcomes.items():
            (response.errors if is_error(outcome) else response.results)[engine_id].CopyFrom(outcome)
        return response

    return rpc


class AdminService(pb_grpc.AdminServiceServicer):
    """Answers are the engines'; drains and log levels are this frontend's, in all its processes."""

    def __init__(self, pool: EnginePool, drain: FrontendDrain, gate: Gate, peers: Peers) -> None:
        self._gate = gate
        self._peers = peers
        self._pool = pool
        self._drain = drain

    ResetPrefixCache = _fan_out(pb.ResetPrefixCacheResponse)
    ResetEncoderCache = _fan_out(pb.ResetEncoderCacheResponse)
    Pause = _fan_out(pb.PauseResponse)
    Resume = _fan_out(pb.ResumeResponse)
    IsPaused = _fan_out(pb.IsPausedResponse)
    Sleep = _fan_out(pb.SleepResponse)
    WakeUp = _fan_out(pb.WakeUpResponse)
    IsSleeping = _fan_out(pb.IsSleepingResponse)
    StartProfile = _fan_out(pb.StartProfileResponse)
    StopProfile = _fan_out(pb.StopProfileResponse)
    DumpState = _fan_out(pb.DumpStateResponse)
    CheckHealth = _fan_out(pb.CheckHealthResponse)
    GetSupportedTasks = _fan_out(pb.GetSupportedTasksResponse)
    GetKvCacheMetadata = _fan_out(pb.GetKvCacheMetadataResponse)
    StartWeightUpdate = _fan_out(pb.StartWeightUpdateResponse)
    UpdateWeights = _fan_out(pb.UpdateWeightsResponse)
    FinishWeightUpdate = _fan_out(pb.FinishWeightUpdateResponse)
    ReloadWeights = _fan_out(pb.ReloadWeightsResponse)
    GetWeightVersion = _fan_out(pb.GetWeightVersionResponse)

    @_audited
    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        reason = request.reason[:MAX_REASON_CHARS] or "an operator asked for it"
        timeout_s = request.timeout_ms / 1000 or None
        num_requests = self._drain.begin(timeout_s, reason)
        num_requests += (await self._peers.drain(timeout_s, reason)).num_requests
        if request.include_engines:
            await drain_engines(self._pool.connections, request.timeout_ms, reason, context.time_remaining())
        return pb.DrainResponse(requests_in_flight=num_requests)

    @_audited
    async def GetDrainStatus(self, request: pb.GetDrainStatusRequest, context: Context) -> pb.GetDrainStatusResponse:
        status = self._drain.status + await self._peers.drain_status()
        return pb.GetDrainStatusResponse(
            draining=status.is_draining,
            requests_in_flight=status.num_requests,
            remaining_ms=int(1000 * status.remaining_s),
        )

    @_audited
    async def SetLogLevel(self, request: pb.SetLogLevelRequest, context: Context) -> pb.SetLogLevelResponse:
        if request.level.upper() not in logging.getLevelNamesMapping():
            raise InvalidRequestError.of_field("level", f"{request.level[:32]!r} is not a level of Python's logging")
        if request.logger and request.logger not in logging.Logger.manager.loggerDict:
            raise InvalidRequestError.of_field("logger", f"no logger has the name {request.logger[:64]!r}")
        target = logging.getLogger(request.logger or None)
        previous = logging.getLevelName(target.getEffectiveLevel())
        target.setLevel(request.level.upper())
        await self._peers.set_log_level(request.level.upper(), request.logger)
        return pb.SetLogLevelResponse(previous_level=previous)

    def caller(self, context: Context) -> str:
        """Address, and the names of its token and of its certificate where it has them."""
        # The call has passed the gate; a token that was taken back since must still be answered for.
        token = self._gate.name_of(caller_of(context))
        names = [name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", ())]
        return " ".join(filter(None, (context.peer(), token and f"token {token}", *names)))

    async def call_engines(self, args: Message, engine_ids: Any, context: Context) -> dict[str, Message]:
        return await call_engines(self._pool.connections, engine_ids, args, context.time_remaining())
