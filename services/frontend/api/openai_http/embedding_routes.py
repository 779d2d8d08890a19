"""/v1/embeddings."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

from fastapi import APIRouter, Response
from starlette.types import Receive, Scope, Send

from frontend.api.embedding import engine_ids, floats, off_loop
from frontend.api.embedding_run import Embedded, EmbeddingRun
from frontend.api.openai_http.answering_http import ERROR_RESPONSES, answers_errors, body_schema
from frontend.api.openai_http.call import HttpCall
from frontend.api.openai_http.embedding_body import NAMES, EmbeddingBody
from frontend.api.openai_http.errors import headers_of, status_of, to_body
from frontend.api.openai_http.sending import run_until_gone, send_whole, to_json
from frontend.llm_frontend import LLMFrontend
from stepwire.errors import StepwireError
from stepwire.v1.embedding_service_pb2 import EmbedRequest


class EmbeddingRoutes:
    """Owner of each request: the task of its connection."""

    body_types = (EmbeddingBody,)

    def __init__(self, frontend: LLMFrontend) -> None:
        self._frontend = frontend
        self.router = APIRouter(tags=["embedding"], responses=ERROR_RESPONSES)
        extra = body_schema(EmbeddingBody)
        self.router.add_api_route(
            "/v1/embeddings", self.embed, methods=["POST"], response_model=None, openapi_extra=extra
        )

    @answers_errors
    async def embed(self, call: HttpCall, request_id: str) -> Response:
        body = await call.read(EmbeddingBody, self._frontend.gate)
        run = EmbeddingRun(self._frontend, call, request_id, deadline_in_s=None)
        return EmbeddingResponse(run, body.to_request(), is_base64=body.encoding_format == "base64")


class EmbeddingResponse(Response):
    """Runs when it is called, all of it inside of one task that a disconnect cancels."""

    def __init__(self, run: EmbeddingRun, request: EmbedRequest, *, is_base64: bool) -> None:
        super().__init__()
        self._run = run
        self._request = request
        self._is_base64 = is_base64

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_gone(self._answer(send), receive)

    async def _answer(self, send: Send) -> None:
        headers = {"x-request-id": self._run.request_id}
        try:
            embedded = await self._run.run(self._request)
        except StepwireError as error:
            await send_whole(status_of(error), to_json(to_body(error, NAMES)), {**headers_of(error), **headers}, send)
            return
        body = await off_loop(embedded, partial(self._to_body, embedded))
        await send_whole(200, body, {**headers, "x-engine-id": ",".join(engine_ids(embedded))}, send)

    def _to_body(self, embedded: Embedded) -> bytes:
        num_tokens = embedded.num_prompt_tokens
        data = [
            {"object": "embedding", "index": index, "embedding": self._encode(vector.values)}
            for index, vector in enumerate(embedded.vectors)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return to_json({"object": "list", "data": data, "model": embedded.model, "usage": usage})

    def _encode(self, values: bytes) -> Any:
        return base64.b64encode(values).decode() if self._is_base64 else floats(values).tolist()
