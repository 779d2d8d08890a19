"""What the runners of both Python clients share: lines in, calls of the client, lines out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from stepwire.v1 import (
    chat_service_pb2,
    embedding_service_pb2,
    generation_service_pb2,
    model_service_pb2,
    tokenization_service_pb2,
)
from stepwire_client import CallError, CallFacts, Credentials
from stepwire_client.short_calls import CLIENT_CLASS_KEY

MAX_RESUMES = 2


def same(answer: Any) -> Any:
    return answer


@dataclass(frozen=True)
class Method:
    """`call(client, request, options)`: what the client returns, to be awaited where it is the asyncio client."""

    request_class: type[Message]
    call: Callable[[Any, Any, dict[str, Any]], Any]
    is_stream: bool = False
    # The answer as a message.
    to_message: Callable[[Any], Message] = same


def tokenize(client: Any, request: Any, _options: dict[str, Any]) -> Any:
    return client.tokenize(
        request.texts,
        model=request.model,
        add_special_tokens=not request.HasField("add_special_tokens") or request.add_special_tokens,
        return_offsets=request.return_offsets,
    )


METHODS = {
    "GenerationService/Generate": Method(
        generation_service_pb2.GenerateRequest, lambda client, request, options: client.generate(request, **options)
    ),
    "GenerationService/GenerateStream": Method(
        generation_service_pb2.GenerateRequest,
        lambda client, request, options: client.generate_stream(request, **options),
        is_stream=True,
    ),
    "GenerationService/Abort": Method(
        generation_service_pb2.AbortRequest, lambda client, request, _: client.abort(request.request_ids)
    ),
    "ChatService/Chat": Method(
        chat_service_pb2.ChatRequest, lambda client, request, options: client.chat(request, **options)
    ),
    "ChatService/ChatStream": Method(
        chat_service_pb2.ChatRequest,
        lambda client, request, options: client.chat_stream(request, **options),
        is_stream=True,
    ),
    "EmbeddingService/Embed": Method(
        embedding_service_pb2.EmbedRequest, lambda client, request, options: client.embed(request, **options)
    ),
    "TokenizationService/Tokenize": Method(tokenization_service_pb2.TokenizeRequest, tokenize),
    "TokenizationService/Detokenize": Method(
        tokenization_service_pb2.DetokenizeRequest,
        lambda client, request, _: client.detokenize([sequence.ids for sequence in request.sequences]),
    ),
    "ModelService/ListModels": Method(
        model_service_pb2.ListModelsRequest,
        lambda client, _request, _options: client.models(),
        to_message=lambda models: model_service_pb2.ListModelsResponse(models=models),
    ),
}


class Call:
    """One line of input, and the reply to it as it grows."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.method = METHODS[line["method"].removeprefix("stepwire.v1.")]
        self.request = ParseDict(line["request"], self.method.request_class())
        metadata = dict(line.get("metadata", {}))
        self.token = metadata.pop("authorization", "").removeprefix("Bearer ") or os.environ.get("STEPWIRE_TOKEN", "")
        self.client_class = metadata.pop(CLIENT_CLASS_KEY, "")
        self._cancel_after = line.get("cancel_after_messages", 0)
        self._facts = CallFacts()
        self.options: dict[str, Any] = {
            "timeout_s": line.get("timeout_ms", 0) / 1000 or None,
            "metadata": tuple(metadata.items()),
            "facts": self._facts,
        }
        if line.get("resume"):
            self.options["max_resumes"] = MAX_RESUMES
        self._messages: list[dict[str, Any]] = []
        self._end: dict[str, Any] = {"code": "OK"}

    @property
    def client_options(self) -> dict[str, Any]:
        ca_file = Path(sys.argv[2]) if len(sys.argv) > 2 else None
        return {"client_class": self.client_class, "credentials": Credentials(self.token, tls_ca_file=ca_file)}

    def take(self, message: Message) -> bool:
        """Whether this was the message after which the call is cancelled."""
        self._messages.append(MessageToDict(message, preserving_proto_field_name=True))
        is_enough = len(self._messages) == self._cancel_after
        if is_enough:
            self._end = {"code": "CANCELLED"}
        return is_enough

    def fail(self, error: CallError) -> None:
        details = error.details
        self._end = {
            "code": error.code.name,
            "message": error.message,
            "reason": error.reason,
            "error_metadata": details.metadata,
            "retry_delay_ms": round(details.retry_after_s * 1000),
            "field_violations": [{"field": one.field, "description": one.description} for one in details.violations],
            "quota_violations": [{"subject": one.subject, "description": one.description} for one in details.quota],
            "pushback_ms": details.pushback_ms,
        }

    def reply(self) -> dict[str, Any]:
        trailers = {key: value for key, value in self._facts.trailers.items() if isinstance(value, str)}
        return {"messages": self._messages, "trailers": trailers, **self._end}
