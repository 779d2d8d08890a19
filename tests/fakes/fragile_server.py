"""A gRPC server whose streams break where a test says; it answers every request with the same tokens.

Token i of the answer is 10 + i and reads "i ". A request that resumes is answered from where it says that it stands.
With tools a chat is answered by one call, whose arguments read so, and whose id names the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from stepwire import grpc_options
from stepwire.errors import InvalidRequestError, StepwireError
from stepwire.grpc_errors import abort_sync
from stepwire.v1 import chat_service_pb2_grpc, common_pb2, generation_service_pb2_grpc
from stepwire.v1.chat_service_pb2 import ChatStreamResponse
from stepwire.v1.generation_service_pb2 import GenerateStreamResponse

NUM_TOKENS = 6
SEED = 2**62 + 1


@dataclass(frozen=True)
class Break:
    """One stream ends with this error after so many tokens; None = even before Accepted."""

    error: StepwireError
    after_tokens: int | None = None


class FragileServer(generation_service_pb2_grpc.GenerationServiceServicer, chat_service_pb2_grpc.ChatServiceServicer):
    """Each stream takes the next of `breaks`; when none is left streams end well."""

    def __init__(self) -> None:
        self.target = ""
        self.reset()

    def reset(self) -> None:
        self.breaks: list[Break] = []
        self.requests: list[Any] = []
        # So many of the next resumed streams answer with other tokens.
        self.num_shifted = 0

    def GenerateStream(self, request, context) -> Iterator[GenerateStreamResponse]:
        return self._stream(request, context, GenerateStreamResponse, "text")

    def ChatStream(self, request, context) -> Iterator[ChatStreamResponse]:
        return self._stream(request, context, ChatStreamResponse, "content")

    def _stream(self, request, context, response: Any, text_field: str) -> Iterator[Any]:
        self.requests.append(request)
        stop = self.breaks.pop(0) if self.breaks else None
        if stop is not None and stop.after_tokens is None:
            abort_sync(context, stop.error)
        start = len(request.resume_output_token_ids.ids)
        if start == NUM_TOKENS:
            # As a frontend does: there is nothing left to generate.
            abort_sync(context, InvalidRequestError("nothing is left", reason="FIELD_INVALID"))
        request_id = request.request_id or "assigned"
        yield response(index=0, accepted=response.Accepted(request_id=request_id, prompt_tokens=3, seed=SEED))
        num_left, first_token = NUM_TOKENS - start, 10
        if start and self.num_shifted:
            self.num_shifted, first_token = self.num_shifted - 1, 100
        for index in range(num_left + 1):
            if stop is not None and index == stop.after_tokens:
                abort_sync(context, stop.error)
            if index < num_left:
                delta = response.Delta(token_ids=[first_token + start + index])
                self._put_text(request, delta, f"{start + index} ", text_field)
                yield response(index=1 + index, delta=delta)
        yield response(index=1 + num_left, finished=response.Finished(reason=common_pb2.FINISH_REASON_LENGTH))

    def _put_text(self, request, delta: Any, text: str, text_field: str) -> None:
        if text_field == "text" or not request.tools:
            setattr(delta, text_field, text)
            return
        call = delta.tool_calls.add(arguments=text)
        if text == "0 ":
            call.id, call.name = f"call {len(self.requests)}", request.tools[0].name


@contextmanager
def running() -> Iterator[FragileServer]:
    """The server on a free loopback port."""
    fragile = FragileServer()
    server = grpc.server(futures.ThreadPoolExecutor(4), options=grpc_options.SERVER)
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(fragile, server)
    chat_service_pb2_grpc.add_ChatServiceServicer_to_server(fragile, server)
    fragile.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield fragile
    finally:
        server.stop(None).wait()
