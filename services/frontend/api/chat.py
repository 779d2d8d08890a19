"""stepwire.v1.ChatService: Chat, ChatStream. Aborts go through GenerationService, which knows the same requests."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from functools import partial

from frontend.api.answering import Context, answers_errors, caller_of, client_class_of, rank_of, request_id_of
from frontend.api.chat_messages import UnaryChatAnswer, num_entries, to_message
from frontend.api.load_report import load_format_of, load_trailers
from frontend.api.streaming import convert, headers_of, writing
from frontend.chat.events import ChatDelta, ChatFinished
from frontend.chat.service import Chat
from frontend.generation import Generation
from frontend.llm_frontend import LLMFrontend
from stepwire.v1 import chat_service_pb2 as pb
from stepwire.v1 import chat_service_pb2_grpc as pb_grpc


class ChatService(pb_grpc.ChatServiceServicer):
    """Owner of each request: the task of its RPC."""

    def __init__(self, frontend: LLMFrontend) -> None:
        self._frontend = frontend

    @answers_errors
    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatResponse:
        form = load_format_of(context)
        async with self._open(request, context) as generation:
            chat = await _submit(generation, request, context)
            answer = UnaryChatAnswer(chat)
            while events := await chat.next():
                await convert(num_entries(events), partial(answer.add, events))
        with writing():
            await context.send_initial_metadata(headers_of(generation))
        context.set_trailing_metadata(load_trailers(form, generation))
        return answer.build()

    @answers_errors
    async def ChatStream(  # type: ignore[override]  # the stubs know the generator style only
        self, request: pb.ChatRequest, context: Context
    ) -> None:
        form = load_format_of(context)
        async with self._open(request, context) as generation:
            chat = await _submit(generation, request, context)
            with writing():
                await _stream(chat, context)
        context.set_trailing_metadata(load_trailers(form, generation))

    def _open(self, request: pb.ChatRequest, context: Context) -> AbstractAsyncContextManager[Generation]:
        request_id = request_id_of(request.request_id, context)
        return self._frontend.generation(
            request_id,
            caller=caller_of(context),
            client_class=client_class_of(context),
            deadline_in_s=context.time_remaining(),
        )


async def _submit(generation: Generation, request: pb.ChatRequest, context: Context) -> Chat:
    return await Chat.submit(
        generation,
        request,
        client_class=generation.caller.client_class,
        deadline_in_s=context.time_remaining(),
        rank=rank_of(context),
    )


async def _stream(chat: Chat, context: Context) -> None:
    index = 0
    num_open = chat.processed.num_choices
    while events := await chat.next():
        if index == 0:
            await context.send_initial_metadata(headers_of(chat.generation))
        for event in events:
            num_open -= isinstance(event, ChatFinished)
            to_be_made = partial(to_message, event, chat, is_last=num_open == 0)
            message = await convert(num_entries([event]), to_be_made)
            message.index = index
            index += 1
            await context.write(message)
            if isinstance(event, ChatDelta):
                chat.generation.tokens_emitted += event.num_tokens
