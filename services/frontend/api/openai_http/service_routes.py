"""What is served beside generation: models, the tokenizer, health, version. Paths beyond OpenAI's are vLLM's."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse

from frontend.api.answering import caller_of, client_class_of
from frontend.api.openai_http.answering_http import (
    ERROR_RESPONSES,
    answers_errors,
    body_schema,
    error_response,
)
from frontend.api.openai_http.call import HttpCall
from frontend.api.openai_http.chat_body import ConversationBody
from frontend.api.openai_http.fields import Part, UInt32
from frontend.api.tokenization import MAX_TOKEN_IDS, detokenize, encode_chat, tokenize
from frontend.chat.service import prepare_in_thread
from frontend.llm_frontend import LLMFrontend
from frontend.serving_model import ServingModel
from stepwire import __version__
from stepwire.errors import InvalidRequestError, UnavailableError
from stepwire.v1 import common_pb2, tokenization_service_pb2

# The handler reads it from the call, where FastAPI does not see it.
_MODEL_IN_PATH = {"parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]}


class TokenizeBody(ConversationBody):
    """Either a prompt or messages."""

    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Part):
    model: str | None = None
    tokens: Annotated[list[UInt32], Field(max_length=MAX_TOKEN_IDS)]


class ServiceRoutes:
    """Owner: the task of each request."""

    body_types = (TokenizeBody, DetokenizeBody)

    def __init__(self, frontend: LLMFrontend, is_ready: Callable[[], bool]) -> None:
        self._frontend = frontend
        self._is_ready = is_ready
        self._created = int(time.time())
        self.router = APIRouter(tags=["service"], responses=ERROR_RESPONSES)
        add = self.router.add_api_route
        add("/v1/models", self.list_models, response_model=None)
        add("/v1/models/{model:path}", self.get_model, response_model=None, openapi_extra=_MODEL_IN_PATH)
        add("/tokenize", self.tokenize, methods=["POST"], response_model=None, openapi_extra=body_schema(TokenizeBody))
        extra = body_schema(DetokenizeBody)
        add("/detokenize", self.detokenize, methods=["POST"], response_model=None, openapi_extra=extra)
        add("/health", self.health, response_model=None, response_class=Response)
        add("/version", self.version, response_model=None)

    @answers_errors
    async def list_models(self, call: HttpCall, request_id: str) -> Response:
        self._frontend.gate.identify(caller_of(call), client_class_of(call))
        return JSONResponse({"object": "list", "data": [self._describe(self._frontend.model)]})

    @answers_errors
    async def get_model(self, call: HttpCall, request_id: str) -> Response:
        self._frontend.gate.identify(caller_of(call), client_class_of(call))
        model = self._frontend.model
        model.input_processor.check_model(call.path_parameter("model"))
        return JSONResponse(self._describe(model))

    @answers_errors
    async def tokenize(self, call: HttpCall, request_id: str) -> Response:
        body = await call.read(TokenizeBody, self._frontend.gate)
        if (body.prompt is None) == (not body.messages):
            raise InvalidRequestError.of_field("prompt", "either prompt or messages is needed")
        with self._frontend.tokenization(caller_of(call), client_class_of(call)) as model:
            token_ids = await (_tokenize_chat(body, model) if body.prompt is None else _tokenize_text(body, model))
            max_model_len = model.facts.max_model_len
        return JSONResponse({"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids})

    @answers_errors
    async def detokenize(self, call: HttpCall, request_id: str) -> Response:
        body = await call.read(DetokenizeBody, self._frontend.gate)
        request = tokenization_service_pb2.DetokenizeRequest(
            model=body.model or "", sequences=[common_pb2.TokenIds(ids=body.tokens)], skip_special_tokens=False
        )
        with self._frontend.tokenization(caller_of(call), client_class_of(call)) as model:
            model.input_processor.check_model(request.model)
            work = partial(detokenize, request, model.tokenizer, model.facts.vocab_size)
            response = await model.input_processor.in_thread(work)
        return JSONResponse({"prompt": response.texts[0]})

    async def health(self, request: Request) -> Response:
        """200 while requests are taken."""
        if self._is_ready():
            return Response()
        return error_response(UnavailableError("no engine is ready, or this frontend shuts down"))

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    def _describe(self, model: ServingModel) -> dict[str, Any]:
        facts = model.facts
        fixed = {"object": "model", "created": self._created, "owned_by": "stepwire"}
        return {"id": facts.model, **fixed, "max_model_len": facts.max_model_len}


async def _tokenize_text(body: TokenizeBody, model: ServingModel) -> list[int]:
    request = tokenization_service_pb2.TokenizeRequest(
        model=body.model or "", texts=[body.prompt or ""], add_special_tokens=body.add_special_tokens
    )
    model.input_processor.check_model(request.model)
    response = await model.input_processor.in_thread(partial(tokenize, request, model.tokenizer))
    return list(response.encodings[0].token_ids)


async def _tokenize_chat(body: TokenizeBody, model: ServingModel) -> list[int]:
    """As /v1/chat/completions would."""
    prepared = await prepare_in_thread(body.to_conversation(), model)
    work = partial(encode_chat, prepared.request.text, model.tokenizer)
    return list((await model.input_processor.in_thread(work)).token_ids)
