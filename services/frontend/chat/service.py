"""One chat on top of a Generation: a conversation in, content, reasoning and tool calls out.

The one path of every protocol: each builds a ChatRequest and reads the same events. Owner: the task of the handler, on
the event loop; rendering and tokenizing run in the tokenizer's threads.

    async with frontend.generation(request_id, caller=..., deadline_in_s=...) as generation:
        chat = await Chat.submit(generation, request, client_class=..., deadline_in_s=..., rank=None)
        while events := await chat.next():
            ...
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from frontend.chat.answer import ChoiceAnswer
from frontend.chat.events import ChatEvent
from frontend.chat.preparation import PreparedChat, in_terms_of_chat, prepare
from frontend.detokenizer import Detokenizer
from frontend.generation import Generation
from frontend.generation_events import Admitted, ChoiceDelta, ChoiceFinished, CollectorItem
from frontend.input_processor import ProcessedRequest
from frontend.serving_model import ServingModel
from frontend.tokenizer import Tokenizer
from stepwire.errors import InvalidRequestError, StepwireError
from stepwire.v1 import chat_service_pb2


class Chat:
    """Made by `submit`; `next` until it returns nothing."""

    def __init__(self, generation: Generation, prepared: PreparedChat, processed: ProcessedRequest) -> None:
        # Engine, fingerprint, usage, timings; the handler counts `tokens_emitted` there.
        self.generation = generation
        # Prompt ids, seed, output settings.
        self.processed = processed
        self._has_tool_grammar = prepared.has_tool_grammar
        self._answers = [
            ChoiceAnswer(choice, prepared.new_parser(), is_parallel=prepared.plan.is_parallel)
            for choice in range(processed.num_choices)
        ]

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

        Raises InvalidRequestError with fields of ChatRequest, OverloadedError or UnavailableError.
        """
        started = time.monotonic()
        model = generation.model
        prepared = await prepare_in_thread(request, model)
        left = None if deadline_in_s is None else deadline_in_s - (time.monotonic() - started)
        try:
            processed = await model.input_processor.process(
                prepared.request, request_id=generation.request_id, client_class=client_class, deadline_in_s=left
            )
            chat = cls(generation, prepared, processed)
            if processed.resume_output_token_ids:
                await model.input_processor.in_thread(partial(chat._skip_resumed, model.tokenizer))
            generation.submit(processed, rank, new_reasoning=prepared.new_reasoning)
        except InvalidRequestError as error:
            raise in_terms_of_chat(error, prepared) from error
        return chat

    async def next(self) -> Sequence[ChatEvent]:
        """The next news, at least one; none when every choice has ended. Raises whatever ended the request."""
        while items := await self._next_items():
            if events := self._read_all(items):
                return events
        return ()

    @property
    def num_reasoning_tokens(self) -> int:
        """Part of the completion tokens; a token that is reasoning and content counts."""
        return sum(answer.num_reasoning_tokens for answer in self._answers)

    async def _next_items(self) -> Sequence[CollectorItem]:
        try:
            return await self.generation.next()
        except StepwireError as error:
            if error.reason == "GRAMMAR_INVALID" and self._has_tool_grammar:
                # The grammar is ours; what is in it is the caller's.
                raise InvalidRequestError.of_field("tools", error.message, reason=error.reason) from error
            raise

    def _read_all(self, items: Sequence[CollectorItem]) -> Sequence[ChatEvent]:
        """Raises RequestFailedError where a parser fails: by what a model may write, it ends no other request."""
        try:
            return [event for item in items for event in self._read(item)]
        except Exception as error:
            generation = self.generation
            fields = {"request_id": generation.request_id}
            raise generation.model.output_processor.failed(error, fields) from error

    def _read(self, item: CollectorItem) -> Sequence[ChatEvent]:
        if isinstance(item, ChoiceDelta):
            delta = self._answers[item.choice].take(item)
            return () if delta is None else (delta,)
        if isinstance(item, ChoiceFinished):
            return self._answers[item.choice].finish(item)
        # Log-probabilities of the prompt, the only other event, can not be asked for.
        return (item,) if isinstance(item, Admitted) else ()

    def _skip_resumed(self, tokenizer: Tokenizer) -> None:
        """Bring the parser to where the broken stream ended. A resumed request has one choice."""
        processed = self.processed
        detokenizer = Detokenizer(
            tokenizer, processed.prompt_token_ids, skip_special_tokens=processed.output.skip_special_tokens
        )
        for token_id in processed.resume_output_token_ids:
            self._answers[0].skip(detokenizer.step(token_id))


async def prepare_in_thread(request: chat_service_pb2.ChatRequest, model: ServingModel) -> PreparedChat:
    """Check and render. Raises InvalidRequestError."""
    model.input_processor.check_model(request.model)
    return await model.input_processor.in_thread(partial(prepare, request, model.chat))
