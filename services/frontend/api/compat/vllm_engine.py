"""vllm.grpc.engine.VllmEngine: what gateways written for vLLM call. Each RPC is a translation, never a second path.

Operations on the engine (FlushCache, profiles) are not for callers of the public port: AdminService has them.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from frontend.api.answering import Context, Rpc, answers_errors, caller_of, client_class_of, rank_of, request_id_of
from frontend.api.compat.engine_facts_messages import to_loads, to_model_info, to_server_info
from frontend.api.compat.generate_answer import GenerateAnswer
from frontend.api.compat.generate_request import to_generate_request
from frontend.api.streaming import convert, headers_of, writing
from frontend.api.tokenizer_chunks import tokenizer_chunks
from frontend.engine_client.pool import RANK_FIELD
from frontend.generation import Generation
from frontend.generation_events import ChoiceDelta
from frontend.input_processor import ProcessedRequest
from frontend.llm_frontend import LLMFrontend
from stepwire.errors import InvalidRequestError

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]


def _unsupported(why: str) -> Rpc[Any, Any, Any]:
    @answers_errors
    async def rpc(self: VllmEngine, request: Any, context: Context) -> None:
        raise InvalidRequestError(why, reason="UNSUPPORTED_FEATURE")

    return rpc


class VllmEngine(pb_grpc.VllmEngineServicer):  # type: ignore[misc]  # its package has no types
    """Owner of each request: the task of its RPC."""

    Embed = _unsupported("this model does not pool")
    FlushCache = _unsupported("not on this port; AdminService.ResetPrefixCache does it")
    StartProfile = _unsupported("not on this port; AdminService.StartProfile does it")
    StopProfile = _unsupported("not on this port; AdminService.StopProfile does it")
    SubscribeKvEvents = _unsupported("not on this port; the engines' KvEventsService has the events")

    def __init__(self, frontend: LLMFrontend) -> None:
        self._frontend = frontend
        self._start = time.monotonic()

    @answers_errors
    async def Generate(self, request: Any, context: Context) -> None:
        message = to_generate_request(request)
        rank = _rank_of(request, context)
        async with self._frontend.generation(
            request_id_of(request.request_id, context),
            caller=caller_of(context),
            client_class=client_class_of(context),
            deadline_in_s=context.time_remaining(),
        ) as generation:
            processed = await generation.model.input_processor.process(
                message,
                request_id=generation.request_id,
                client_class=generation.caller.client_class,
                deadline_in_s=context.time_remaining(),
            )
            generation.submit(processed, rank)
            with writing():
                await _answer(generation, processed, context, is_stream=request.stream)

    @answers_errors
    async def Abort(self, request: Any, context: Context) -> Any:
        # A gateway whose client is gone sends this and leaves the stream open, which ends by it.
        await self._frontend.abort(caller_of(context), request.request_ids)
        return pb.AbortResponse()

    @answers_errors
    async def HealthCheck(self, request: Any, context: Context) -> Any:
        is_serving = self._frontend.is_serving
        return pb.HealthCheckResponse(healthy=is_serving, message="" if is_serving else "no engine can serve now")

    @answers_errors
    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        return to_model_info(self._frontend.model, self._frontend.settings)

    @answers_errors
    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        uptime_s = time.monotonic() - self._start
        return to_server_info(self._frontend.pool.connections, self._frontend.num_in_flight, uptime_s)

    @answers_errors
    async def GetLoads(self, request: Any, context: Context) -> Any:
        rank = request.dp_rank if request.HasField("dp_rank") else None
        return to_loads(self._frontend.pool.connections, rank)

    @answers_errors
    async def GetTokenizer(self, request: Any, context: Context) -> None:
        with self._frontend.tokenization(caller_of(context), client_class_of(context)) as model:
            chunks = await tokenizer_chunks(model)
        with writing():
            for data, sha256 in chunks:
                await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=sha256))


def _rank_of(request: Any, context: Context) -> int | None:
    if not request.HasField("data_parallel_rank"):
        return rank_of(context)
    rank: int = request.data_parallel_rank
    if rank < 0:
        raise InvalidRequestError.of_field(RANK_FIELD, f"{rank} is less than 0")
    return rank


async def _answer(generation: Generation, processed: ProcessedRequest, context: Context, *, is_stream: bool) -> None:
    answer = GenerateAnswer(generation, processed, is_stream=is_stream)
    has_headers = False
    while items := await generation.next():
        if not has_headers:
            # Not earlier: a client's own retries end with the first header.
            await context.send_initial_metadata(headers_of(generation))
            has_headers = True
        for item in items:
            message = await convert(answer.num_entries(item), partial(answer.take, item))
            if message is not None:
                await context.write(message)
            if isinstance(item, ChoiceDelta) and is_stream:
                generation.tokens_emitted += item.num_tokens


def add_to(server: grpc.aio.Server, frontend: LLMFrontend) -> None:
    """Serve it too."""
    pb_grpc.add_VllmEngineServicer_to_server(VllmEngine(frontend), server)
