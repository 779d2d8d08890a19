"""A typed, synchronous client of stepwire servers; safe to share between threads.

Requests and answers are the protobuf messages of stepwire.v1, so every field of the API is reachable and documented
in one place. It never repeats a stream by itself: after Accepted a repeat would generate twice. It goes on with one
where it is told to.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Self

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
from stepwire_client import short_calls
from stepwire_client.call_facts import CallFacts
from stepwire_client.calls import Method, Response, StreamingMethod, call, resuming, stream
from stepwire_client.credentials import NO_CREDENTIALS, Credentials, Metadata
from stepwire_client.deadline import Deadline
from stepwire_client.resuming import ResumableStream
from stepwire_client.short_calls import DEFAULT_TARGET, DOWNLOAD_TIMEOUT_S, GENERATION_SERVICE, LOOKUP_TIMEOUT_S


class Client:
    """One channel to one server, or to several behind one name. Every failed call raises CallError.

    `timeout_s` of a call is the whole time it may take; `metadata` goes with it (`x-request-id`, `traceparent`,
    `x-data-parallel-rank`, ...); `facts` is filled with what the server says beside the answer.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        client_class: str = "",
        credentials: Credentials = NO_CREDENTIALS,
        is_balanced: bool = False,
    ) -> None:
        """`client_class`: whose share of the engines the generations use; empty = that of all without one.

        `is_balanced`: `target` stands for several servers (dns:///name:50051); calls go in turn to those that serve.
        """
        self.target = target
        self._token = credentials.metadata
        self._metadata = short_calls.generation_metadata(self._token, client_class)
        self._channel = credentials.channel(target, is_balanced=is_balanced)
        self._generation = generation_service_pb2_grpc.GenerationServiceStub(self._channel)
        self._chat = chat_service_pb2_grpc.ChatServiceStub(self._channel)
        self._embedding = embedding_service_pb2_grpc.EmbeddingServiceStub(self._channel)
        self._tokenization = tokenization_service_pb2_grpc.TokenizationServiceStub(self._channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate_stream(
        self,
        request: generation_service_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        max_resumes: int = 0,
        metadata: Metadata = (),
        facts: CallFacts | None = None,
    ) -> Generator[generation_service_pb2.GenerateStreamResponse, None, None]:
        """Accepted, then deltas, then one Finished per choice. Closing the generator aborts the request.

        With `max_resumes` up to so many calls more are made when the stream breaks with UNAVAILABLE after Accepted, or
        because the caller read too slowly: the answer goes on where it broke, greedy or sampled, with one Accepted,
        messages numbered without a gap, and usage of the whole answer; timings are the last call's. Waits as the server
        advises, and never beyond `timeout_s`.

        A cancelled request is never resumed: somebody wanted its end. Nor are several choices: the API resumes one
        sequence of tokens, so n > 1 is a ValueError.
        """
        return self._stream(self._generation.GenerateStream, request, timeout_s, max_resumes, metadata, facts)

    def generate(
        self,
        request: generation_service_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        facts: CallFacts | None = None,
    ) -> generation_service_pb2.GenerateResponse:
        """The whole answer at once."""
        return call(self._generation.Generate, request, timeout_s, (*self._metadata, *metadata), facts)

    def chat_stream(
        self,
        request: chat_service_pb2.ChatRequest,
        *,
        timeout_s: float | None = None,
        max_resumes: int = 0,
        metadata: Metadata = (),
        facts: CallFacts | None = None,
    ) -> Generator[chat_service_pb2.ChatStreamResponse, None, None]:
        """Accepted, then deltas, then one Finished per choice. Closing the generator aborts the request.

        `max_resumes` as for `generate_stream`; reasoning and tool calls go on as well.
        """
        return self._stream(self._chat.ChatStream, request, timeout_s, max_resumes, metadata, facts)

    def chat(
        self,
        request: chat_service_pb2.ChatRequest,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        facts: CallFacts | None = None,
    ) -> chat_service_pb2.ChatResponse:
        """The whole message of each choice at once; it can go into the next request as it is."""
        return call(self._chat.Chat, request, timeout_s, (*self._metadata, *metadata), facts)

    def embed(
        self,
        request: embedding_service_pb2.EmbedRequest,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        facts: CallFacts | None = None,
    ) -> embedding_service_pb2.EmbedResponse:
        """One vector for each input, in order; one input that fails is the failure of all."""
        return call(self._embedding.Embed, request, timeout_s, (*self._metadata, *metadata), facts)

    def render_chat(
        self, request: chat_service_pb2.ChatRequest, *, timeout_s: float | None = LOOKUP_TIMEOUT_S
    ) -> tokenization_service_pb2.RenderChatResponse:
        """The prompt that a chat would send to the engine, as text and token ids."""
        return self._call(self._tokenization.RenderChat, short_calls.render_chat(request), timeout_s)

    def abort(
        self, request_ids: Sequence[str], *, timeout_s: float | None = LOOKUP_TIMEOUT_S
    ) -> generation_service_pb2.AbortResponse:
        """End requests by id; unknown and finished ids are no error."""
        return self._call(self._generation.Abort, short_calls.abort(request_ids), timeout_s)

    def tokenize(
        self,
        texts: Sequence[str],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        return_offsets: bool = False,
        timeout_s: float | None = LOOKUP_TIMEOUT_S,
    ) -> tokenization_service_pb2.TokenizeResponse:
        """One encoding for each text, in order."""
        request = short_calls.tokenize(
            texts, model, add_special_tokens=add_special_tokens, return_offsets=return_offsets
        )
        return self._call(self._tokenization.Tokenize, request, timeout_s)

    def detokenize(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        model: str = "",
        skip_special_tokens: bool = True,
        timeout_s: float | None = LOOKUP_TIMEOUT_S,
    ) -> tokenization_service_pb2.DetokenizeResponse:
        """One text for each list of token ids, in order."""
        request = short_calls.detokenize(sequences, model, skip_special_tokens=skip_special_tokens)
        return self._call(self._tokenization.Detokenize, request, timeout_s)

    def tokenizer_archive(self, model: str = "", *, timeout_s: float | None = DOWNLOAD_TIMEOUT_S) -> bytes:
        """The model's tokenizer files as a zip archive; its SHA-256 is Model.tokenizer_sha256."""
        request = tokenization_service_pb2.GetTokenizerRequest(model=model)
        pieces = stream(self._tokenization.GetTokenizer, request, timeout_s, self._token)
        return b"".join(piece.data for piece in pieces)

    def models(self, *, timeout_s: float | None = LOOKUP_TIMEOUT_S) -> Sequence[model_service_pb2.Model]:
        """Everything that GenerateRequest.model accepts."""
        return self._call(self._models.ListModels, model_service_pb2.ListModelsRequest(), timeout_s).models

    def health(self, service: str = GENERATION_SERVICE, *, timeout_s: float | None = LOOKUP_TIMEOUT_S) -> bool:
        """Whether the service is SERVING; the empty name asks about the process itself."""
        request = health_pb2.HealthCheckRequest(service=service)
        return short_calls.is_serving(self._call(self._health.Check, request, timeout_s))

    def close(self) -> None:
        """Cancels every call that still runs."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: Method[Response], request: Any, timeout_s: float | None = LOOKUP_TIMEOUT_S) -> Response:
        return call(method, request, timeout_s, self._token)

    def _stream(
        self,
        method: StreamingMethod[Response],
        request: Any,
        timeout_s: float | None,
        max_resumes: int,
        metadata: Metadata,
        facts: CallFacts | None,
    ) -> Generator[Response, None, None]:
        def once(one: Any, limit_s: float | None) -> Generator[Response, None, None]:
            return stream(method, one, limit_s, (*self._metadata, *metadata), facts)

        def abort(request_id: str, limit_s: float) -> None:
            self.abort([request_id], timeout_s=limit_s)

        if not max_resumes:
            return once(request, timeout_s)
        return resuming(once, abort, ResumableStream(request, max_resumes, Deadline.after(timeout_s), facts))
