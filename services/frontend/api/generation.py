"""stepwire.v1.GenerationService: Generate, GenerateStream, Abort."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial

from frontend.api.answering import Context, answers_errors, caller_of, client_class_of, rank_of, request_id_of
from frontend.api.generation_messages import UnaryAnswer, to_delta, to_message
from frontend.api.load_report import load_format_of, load_trailers
from frontend.api.logprobs_messages import num_entries
from frontend.api.streaming import convert, headers_of, writing
from frontend.generation import Generation
from frontend.generation_events import ChoiceDelta, ChoiceFinished
from frontend.input_processor import ProcessedRequest
from frontend.llm_frontend import LLMFrontend
from stepwire.v1 import generation_service_pb2 as pb
from stepwire.v1 import generation_service_pb2_grpc as pb_grpc


class GenerationService(pb_grpc.GenerationServiceServicer):
    """Owner of each request: the task of its RPC."""

    def __init__(self, frontend: LLMFrontend) -> None:
        self._frontend = frontend

    @answers_errors
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        request_id, form = request_id_of(request.request_id, context), load_format_of(context)
        async with self._open(request_id, context) as generation:
            processed = await _submit(generation, request, context)
            answer = UnaryAnswer(generation, processed)
            while items := await generation.next():
                await convert(sum(map(num_entries, items)), partial(answer.add, items))
        with writing():
            await context.send_initial_metadata(headers_of(generation))
        context.set_trailing_metadata(load_trailers(form, generation))
        return answer.build()

    @answers_errors
    async def GenerateStream(  # type: ignore[override]  # the stubs know the generator style only
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        request_id, form = request_id_of(request.request_id, context), load_format_of(context)
        async with self._open(request_id, context) as generation:
            processed = await _submit(generation, request, context)
            with writing():
                await _stream(generation, processed, context)
        context.set_trailing_metadata(load_trailers(form, generation))

    @answers_errors
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        live, inactive = await self._frontend.abort(caller_of(context), request.request_ids)
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
            await context.send_initial_metadata(headers_of(generation))
        for item in items:
            if isinstance(item, ChoiceDelta) and item.logprobs is None:
                message = to_delta(item)
            else:
                num_open -= isinstance(item, ChoiceFinished)
                to_be_made = partial(to_message, item, generation, processed, is_last=num_open == 0)
                message = await convert(num_entries(item), to_be_made)
            message.index = index
            index += 1
            await context.write(message)
            if isinstance(item, ChoiceDelta):
                generation.tokens_emitted += item.num_tokens
