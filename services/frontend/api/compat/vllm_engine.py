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
from frontend.api.compat.embed_messages import to_embed_request, to_embed_response
from frontend.api.compat.engine_facts_messages import to_loads, to_model_info, to_server_info
from frontend.api.compat.generate_answer import GenerateAnswer
from frontend.api.compat.generate_request import to_generate_request
from frontend.api.compat.kv_events_messages import KvBatches
from frontend.api.embedding_run import EmbeddingRun
from frontend.api.streaming import convert, headers_of, writing
from frontend.api.tokenizer_chunks import tokenizer_chunks
from frontend.engine_client.pool import RANK_FIELD
from frontend.generation import Generation
from frontend.generation_events import ChoiceDelta
from frontend.input_processor import ProcessedRequest
from frontend.llm_frontend import LLMFrontend
from frontend.retry_advice import RETRY_AFTER_MS
from stepwire.errors import InvalidRequestError, UnavailableError

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"]


def _unsupported(why: str) -> Rpc[Any, Any, Any]:
    @answers_errors
    async def rpc(self: VllmEngine, request: Any, context: Context) -> None:
        raise InvalidRequestError(why, reason="UNSUPPORTED_FEATURE")

    return rpc


class VllmEngine(pb_grpc.VllmEngineServicer):  # type: ignore[misc]  # its package has no types
    """Owner of each request: the task of its RPC."""

    FlushCache = _unsupported("not on this port; AdminService.ResetPrefixCache does it")
    StartProfile = _unsupported("not on this port; AdminService.StartProfile does it")
    StopProfile = _unsupported("not on this port; AdminService.StopProfile does it")

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
    async def Embed(self, request: Any, context: Context) -> Any:
        request_id = request_id_of(request.request_id, context)
        run = EmbeddingRun(self._frontend, context, request_id, context.time_remaining())
        embedded = await run.run(to_embed_request(request))
        with writing():
            await context.send_initial_metadata((("x-request-id", request_id),))
        return to_embed_response(embedded)

    @answers_errors
    async def SubscribeKvEvents(self, request: Any, context: Context) -> None:
        if not self._frontend.settings.relay_kv_events:
            # The engine's port is for frontends alone; this one may be anybody's.
            raise InvalidRequestError("start the frontend with --relay-kv-events", reason="UNSUPPORTED_FEATURE")
        async with self._frontend.pool.kv_events(request.start_sequence_number) as feed:
            with writing():
                # At once: gateways give up on a worker whose headers do not come.
                await context.send_initial_metadata(())
                batches = KvBatches()
                while (news := await feed.next()) is not None:
                    num_tokens = batches.num_tokens + news.num_tokens
                    for batch in await convert(num_tokens, partial(batches.take, news)):
                        await context.write(batch)
        raise UnavailableError("the engine has ended its feed of cache events", retry_after_ms=RETRY_AFTER_MS)

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
