"""stepwire.v1.GenerationService: Generate, GenerateStream, Abort."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import TypeVar

import grpc.aio

from frontend.api.answering import Context, answers_errors, caller_of, client_class_of, rank_of, request_id_of
from frontend.api.generation_messages import UnaryAnswer, to_delta, to_message
from frontend.api.logprobs_messages import MAX_ENTRIES_ON_LOOP, num_entries
from frontend.generation import ClientGoneError, Generation
from frontend.generation_events import ChoiceDelta, ChoiceFinished, CollectorItem
from frontend.input_processor import ProcessedRequest
from frontend.llm_frontend import LLMFrontend
from stepwire.v1 import generation_service_pb2 as pb
from stepwire.v1 import generation_service_pb2_grpc as pb_grpc

Message = TypeVar("Message")


class GenerationService(pb_grpc.GenerationServiceServicer):
    """Owner of each request: the task of its RPC."""

    def __init__(self, frontend: LLMFrontend) -> None:
        self._frontend = frontend

    @answers_errors
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        request_id = request_id_of(request.request_id, context)
        async with self._open(request_id, context) as generation:
            processed = await _submit(generation, request, context)
            answer = UnaryAnswer(generation, processed)
            while items := await generation.next():
                await _convert(items, partial(answer.add, items))
        with _writing():
            await context.send_initial_metadata(_headers(generation))
        return answer.build()

    @answers_errors
    async def GenerateStream(  # type: ignore[override]  # the stubs know the generator style only
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        request_id = request_id_of(request.request_id, context)
        async with self._open(request_id, context) as generation:
            processed = await _submit(generation, request, context)
            with _writing():
                await _stream(generation, processed, context)

    @answers_errors
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        live, inactive = self._frontend.abort(caller_of(context), request.request_ids)
        return pb.AbortResponse(aborted_request_ids=live, inactive_request_ids=inactive)

    def _open(self, request_id: str, context: Context) -> AbstractAsyncContextManager[Generation]:
        return self._frontend.generation(
            request_id,
            caller=caller_of(context),
            client_class=client_class_of(context),
            deadline_in_s=context.time_remaining(),
        )


async def _submit(generation: Generation, request: pb.GenerateRequest, context: Context) -> ProcessedRequest:
    processed = await generation.model.input_processor.process(
        request,
        request_id=generation.request_id,
        client_class=generation.caller.client_class,
        deadline_in_s=context.time_remaining(),
    )
    generation.submit(processed, rank_of(context))
    return processed


async def _stream(generation: Generation, processed: ProcessedRequest, context: Context) -> None:
    index = 0
    num_open = processed.num_choices
    while items := await generation.next():
        if index == 0:
            # Not earlier: a client's own retries end with the first header.
            await context.send_initial_metadata(_headers(generation))
        for item in items:
            if isinstance(item, ChoiceDelta) and item.logprobs is None:
                message = to_delta(item)
            else:
                num_open -= isinstance(item, ChoiceFinished)
                convert = partial(to_message, item, generation, processed, is_last=num_open == 0)
                message = await _convert([item], convert)
            message.index = index
            index += 1
            await context.write(message)
            if isinstance(item, ChoiceDelta):
                generation.tokens_emitted += item.num_tokens


async def _convert(items: Sequence[CollectorItem], convert: Callable[[], Message]) -> Message:
    """Make messages of items: of many log-probabilities in a thread, because it would hold up all other streams."""
    if sum(map(num_entries, items)) > MAX_ENTRIES_ON_LOOP:
        return await asyncio.to_thread(convert)
    return convert()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except grpc.aio.InternalError as error:
        # The connection broke, and gRPC has not yet come to cancel this handler.
        raise ClientGoneError from error


def _headers(generation: Generation) -> tuple[tuple[str, str], ...]:
    return (("x-request-id", generation.request_id), ("x-engine-id", generation.engine_id))
