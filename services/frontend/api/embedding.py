"""stepwire.v1.EmbeddingService: vectors of a batch of inputs."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

from frontend.api.answering import Context, answers_errors, request_id_of
from frontend.api.embedding_run import Embedded, EmbeddingRun
from frontend.api.streaming import writing
from frontend.llm_frontend import LLMFrontend
from stepwire.v1 import common_pb2
from stepwire.v1 import embedding_service_pb2 as pb
from stepwire.v1 import embedding_service_pb2_grpc as pb_grpc

Made = TypeVar("Made")

# Some milliseconds of copying; beyond, other streams would notice.
MAX_VALUES_ON_LOOP = 64 * 1024


class EmbeddingService(pb_grpc.EmbeddingServiceServicer):
    """Owner of each call: the task of its RPC."""

    def __init__(self, frontend: LLMFrontend) -> None:
        self._frontend = frontend

    @answers_errors
    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        request_id = request_id_of(request.request_id, context)
        embedded = await EmbeddingRun(self._frontend, context, request_id, context.time_remaining()).run(request)
        response = await off_loop(embedded, partial(_to_response, embedded, request_id))
        with writing():
            await context.send_initial_metadata(
                (("x-request-id", request_id), ("x-engine-id", ",".join(engine_ids(embedded))))
            )
        return response


def floats(values: bytes) -> array[float]:
    """float32, little-endian -> numbers."""
    return array("f", values)


def engine_ids(embedded: Embedded) -> Iterable[str]:
    """Of the engines that have answered, each once."""
    return dict.fromkeys(vector.engine_id for vector in embedded.vectors)


async def off_loop(embedded: Embedded, make: partial[Made]) -> Made:
    """Make an answer: with many numbers in a thread."""
    if sum(len(vector.values) for vector in embedded.vectors) > 4 * MAX_VALUES_ON_LOOP:
        return await asyncio.to_thread(make)
    return make()


def _to_response(embedded: Embedded, request_id: str) -> pb.EmbedResponse:
    return pb.EmbedResponse(
        embeddings=(pb.EmbedResponse.Embedding(values=floats(vector.values)) for vector in embedded.vectors),
        usage=common_pb2.Usage(
            prompt_tokens=embedded.num_prompt_tokens, cached_prompt_tokens=embedded.num_cached_tokens
        ),
        request_id=request_id,
    )
