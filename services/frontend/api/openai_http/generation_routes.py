"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response

from frontend.api.answering import caller_of, client_class_of
from frontend.api.openai_http.answer import CHAT, COMPLETION, AnswerResponse
from frontend.api.openai_http.answering_http import ERROR_RESPONSES, answers_errors, body_schema
from frontend.api.openai_http.call import HttpCall
from frontend.api.openai_http.chat_body import ChatBody
from frontend.api.openai_http.chat_run import ChatRun
from frontend.api.openai_http.completion_body import CompletionBody
from frontend.api.openai_http.completion_run import CompletionRun
from frontend.call_trace import name_call
from frontend.llm_frontend import LLMFrontend


class GenerationRoutes:
    """Owner of each request: the task of its connection."""

    body_types = (CompletionBody, ChatBody)

    def __init__(self, frontend: LLMFrontend) -> None:
        self._frontend = frontend
        self.router = APIRouter(tags=["generation"])
        for path, handler, body_type in (
            ("/v1/completions", self.complete, CompletionBody),
            ("/v1/chat/completions", self.chat, ChatBody),
        ):
            self.router.add_api_route(
                path,
                handler,
                methods=["POST"],
                response_model=None,
                responses={**ERROR_RESPONSES, 200: {"content": {"text/event-stream": {}}}},
                openapi_extra=body_schema(body_type),
            )

    @answers_errors
    async def complete(self, call: HttpCall, request_id: str) -> Response:
        body = await call.read(CompletionBody, self._frontend.gate)
        requests, names = body.to_requests(self._frontend.settings.max_concurrent_requests)
        num_choices = 1 if body.n is None else body.n
        self._frontend.check_batch(caller_of(call), client_class_of(call), "prompt", len(requests), num_choices)
        name_call(request_id)
        ids = [request_id] if len(requests) == 1 else [f"{request_id}-{index}" for index in range(len(requests))]
        runs = [
            CompletionRun(self._frontend, call, own_id, index * num_choices, request)
            for index, (own_id, request) in enumerate(zip(ids, requests, strict=True))
        ]
        return AnswerResponse(COMPLETION, request_id, runs, names=names, **_stream_options(body))

    @answers_errors
    async def chat(self, call: HttpCall, request_id: str) -> Response:
        body = await call.read(ChatBody, self._frontend.gate)
        request, names = body.to_request()
        runs = [ChatRun(self._frontend, call, request_id, request)]
        return AnswerResponse(CHAT, request_id, runs, names=names, **_stream_options(body))


def _stream_options(body: CompletionBody | ChatBody) -> Mapping[str, Any]:
    return {"is_stream": bool(body.stream), "includes_usage": body.includes_usage}
