"""A typed, synchronous client of one stepwire server; safe to share between threads.

Requests and answers are the protobuf messages of stepwire.v1, so every field of the API is reachable and documented
in one place. It never retries a stream by itself: after Accepted a repeat would generate twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stepwire.v1 import (
    chat_service_pb2,
    chat_service_pb2_grpc,
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    tokenization_service_pb2,
    tokenization_service_pb2_grpc,
)
from stepwire_client.credentials import NO_CREDENTIALS, Credentials, Metadata
from stepwire_client.errors import CallError

DEFAULT_TARGET = "127.0.0.1:50051"
GENERATION_SERVICE = "stepwire.v1.GenerationService"
CLIENT_CLASS_KEY = "x-gateway-inference-fairness-id"
# Generous for calls that only look something up; generations have no limit unless the caller sets one.
LOOKUP_TIMEOUT_S = 10.0
DOWNLOAD_TIMEOUT_S = 60.0

Response = TypeVar("Response")


class Client:
    """One channel to one server. Every failed call raises CallError."""

    def __init__(
        self, target: str = DEFAULT_TARGET, *, client_class: str = "", credentials: Credentials = NO_CREDENTIALS
    ) -> None:
        """`client_class`: whose share of the engines the generations use; empty = that of all without one."""
        self.target = target
        self._token = credentials.metadata
        self._metadata = (*self._token, *(((CLIENT_CLASS_KEY, client_class),) if client_class else ()))
        self._channel = credentials.channel(target)
        self._generation = generation_service_pb2_grpc.GenerationServiceStub(self._channel)
        self._chat = chat_service_pb2_grpc.ChatServiceStub(self._channel)
        self._embedding = embedding_service_pb2_grpc.EmbeddingServiceStub(self._channel)
        self._tokenization = tokenization_service_pb2_grpc.TokenizationServiceStub(self._channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate_stream(
        self, request: generation_service_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> Generator[generation_service_pb2.GenerateStreamResponse, None, None]:
        """Accepted, then deltas, then one Finished per choice. Closing the generator aborts the request."""
        yield from _stream(self._generation.GenerateStream, request, timeout_s, self._metadata)

    def generate(
        self, request: generation_service_pb2.GenerateRequest, *, timeout_s: float | None = None
    ) -> generation_service_pb2.GenerateResponse:
        """The whole answer at once."""
        return _call(self._generation.Generate, request, timeout_s, self._metadata)

    def chat_stream(
        self, request: chat_service_pb2.ChatRequest, *, timeout_s: float | None = None
    ) -> Generator[chat_service_pb2.ChatStreamResponse, None, None]:
        """Accepted, then deltas, then one Finished per choice. Closing the generator aborts the request."""
        yield from _stream(self._chat.ChatStream, request, timeout_s, self._metadata)

    def chat(
        self, request: chat_service_pb2.ChatRequest, *, timeout_s: float | None = None
    ) -> chat_service_pb2.ChatResponse:
        """The whole message of each choice at once; it can go into the next request as it is."""
        return _call(self._chat.Chat, request, timeout_s, self._metadata)

    def embed(
        self, request: embedding_service_pb2.EmbedRequest, *, timeout_s: float | None = None
    ) -> embedding_service_pb2.EmbedResponse:
        """One vector for each input, in order; one input that fails is the failure of all."""
        return _call(self._embedding.Embed, request, timeout_s, self._metadata)

    def render_chat(self, request: chat_service_pb2.ChatRequest) -> tokenization_service_pb2.RenderChatResponse:
        """The prompt that a chat would send to the engine, as text and token ids."""
        message = tokenization_service_pb2.RenderChatRequest(chat=request)
        return _call(self._tokenization.RenderChat, message, LOOKUP_TIMEOUT_S, self._token)

    def abort(self, request_ids: Sequence[str]) -> generation_service_pb2.AbortResponse:
        """End requests by id; unknown and finished ids are no error."""
        request = generation_service_pb2.AbortRequest(request_ids=request_ids)
        return _call(self._generation.Abort, request, LOOKUP_TIMEOUT_S, self._token)

    def tokenize(
        self,
        texts: Sequence[str],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        return_offsets: bool = False,
    ) -> tokenization_service_pb2.TokenizeResponse:
        """One encoding for each text, in order."""
        request = tokenization_service_pb2.TokenizeRequest(
            model=model, texts=texts, add_special_tokens=add_special_tokens, return_offsets=return_offsets
        )
        return _call(self._tokenization.Tokenize, request, LOOKUP_TIMEOUT_S, self._token)

    def tokenizer_archive(self, model: str = "") -> bytes:
        """The model's tokenizer files as a zip archive; its SHA-256 is Model.tokenizer_sha256."""
        request = tokenization_service_pb2.GetTokenizerRequest(model=model)
        pieces = _stream(self._tokenization.GetTokenizer, request, DOWNLOAD_TIMEOUT_S, self._token)
        return b"".join(piece.data for piece in pieces)

    def models(self) -> Sequence[model_service_pb2.Model]:
        """Everything that GenerateRequest.model accepts."""
        request = model_service_pb2.ListModelsRequest()
        return _call(self._models.ListModels, request, LOOKUP_TIMEOUT_S, self._token).models

    def health(self, service: str = GENERATION_SERVICE, *, timeout_s: float = LOOKUP_TIMEOUT_S) -> bool:
        """Whether the service is SERVING; the empty name asks about the process itself."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = _call(self._health.Check, request, timeout_s, self._token)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Cancels every call that still runs."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _call(method: Callable[..., Response], request: Any, timeout_s: float | None, metadata: Metadata) -> Response:
    try:
        return method(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        raise CallError.from_rpc_error(error) from error


def _stream(
    method: Callable[..., Iterable[Response]], request: Any, timeout_s: float | None, metadata: Metadata
) -> Generator[Response, None, None]:
    call: Any = method(request, timeout=timeout_s, metadata=metadata)
    try:
        yield from call
    except grpc.RpcError as error:
        raise CallError.from_rpc_error(error) from error
    finally:
        # A no-op after the last message; otherwise it is what frees the request's KV blocks in the engine.
        call.cancel()
