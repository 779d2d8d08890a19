"""One chat on top of a Generation: a conversation in, content, reasoning and tool calls out.

The one path of every protocol: each builds a ChatRequest and reads the same events. Owner: the task of the handler, on
the event loop; rendering and tokenizing run in the tokenizer's threads.

    async with frontend.generation(request_id, caller=..., deadline_in_s=...) as generation:
        chat = await Chat.submit(generation, request, client_class=..., deadline_in_s=..., rank=None)
        while events := await chat.next():
            ...
"""

from __future__ import annotations

from collections.abc import Sequence

from frontend.chat.events import ChatEvent
from frontend.generation import Generation
from frontend.generation_events import Timings
from frontend.input_processor import ProcessedRequest
from stepwire.v1 import chat_service_pb2, common_pb2


class Chat:
    """Made by `submit`; `next` until it returns nothing."""

    # The generation behind it: engine_id, system_fingerprint, tokens_emitted (set by the handler), num_choices...
    generation: Generation
    # Prompt ids, seed, num_choices, output settings.
    processed: ProcessedRequest

    @classmethod
    async def submit(
        cls,
        generation: Generation,
        request: chat_service_pb2.ChatRequest,
        *,
        client_class: str = "",
        deadline_in_s: float | None = None,
        rank: int | None = None,
    ) -> Chat:
        """Check, render, tokenize and send to an engine.

        Raises InvalidRequestError naming the fields of ChatRequest, OverloadedError, UnavailableError.
        """
        raise NotImplementedError

    async def next(self) -> Sequence[ChatEvent]:
        """The next news; none when every choice has ended. Raises whatever ended the request.

        The news may also be empty without an end: see `is_over`. (Not: `next` waits until there is some.)
        """
        raise NotImplementedError

    @property
    def usage(self) -> common_pb2.Usage:
        """Counts so far, reasoning_tokens among them."""
        raise NotImplementedError

    @property
    def timings(self) -> Timings:
        raise NotImplementedError
