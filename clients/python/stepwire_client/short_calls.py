"""What the synchronous and the asyncio client share: the requests of short calls, names, time limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpc_health.v1 import health_pb2

from stepwire.v1 import chat_service_pb2, common_pb2, generation_service_pb2, tokenization_service_pb2
from stepwire_client.credentials import Metadata

DEFAULT_TARGET = "127.0.0.1:50051"
GENERATION_SERVICE = "stepwire.v1.GenerationService"
CLIENT_CLASS_KEY = "x-gateway-inference-fairness-id"
# Generous for calls that only look something up; generations have no limit unless the caller sets one.
LOOKUP_TIMEOUT_S = 10.0
DOWNLOAD_TIMEOUT_S = 60.0


def abort(request_ids: Sequence[str]) -> generation_service_pb2.AbortRequest:
    return generation_service_pb2.AbortRequest(request_ids=request_ids)


def render_chat(request: chat_service_pb2.ChatRequest) -> tokenization_service_pb2.RenderChatRequest:
    return tokenization_service_pb2.RenderChatRequest(chat=request)


def tokenize(
    texts: Sequence[str], model: str, *, add_special_tokens: bool, return_offsets: bool
) -> tokenization_service_pb2.TokenizeRequest:
    return tokenization_service_pb2.TokenizeRequest(
        model=model, texts=texts, add_special_tokens=add_special_tokens, return_offsets=return_offsets
    )


def detokenize(
    sequences: Sequence[Sequence[int]], model: str, *, skip_special_tokens: bool
) -> tokenization_service_pb2.DetokenizeRequest:
    lists = [common_pb2.TokenIds(ids=ids) for ids in sequences]
    return tokenization_service_pb2.DetokenizeRequest(
        model=model, sequences=lists, skip_special_tokens=skip_special_tokens
    )


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def generation_metadata(token: Metadata, client_class: str) -> Metadata:
    """What goes with every generation and chat."""
    return (*token, (CLIENT_CLASS_KEY, client_class)) if client_class else token
