"""The conformance runner of the synchronous Python client: `python python_runner.py TARGET [CA_FILE]`."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from stepwire.v1 import chat_service_pb2, generation_service_pb2, model_service_pb2, tokenization_service_pb2
from stepwire_client import CallError, Client, Credentials
from stepwire_client.short_calls import CLIENT_CLASS_KEY

Method = Callable[[Client, Any, float | None], Iterable[Message]]


def list_models(client: Client, request: Any, timeout_s: float | None) -> Iterable[Message]:
    yield model_service_pb2.ListModelsResponse(models=client.models())


def tokenize(client: Client, request: Any, timeout_s: float | None) -> Iterable[Message]:
    yield client.tokenize(
        request.texts,
        model=request.model,
        add_special_tokens=not request.HasField("add_special_tokens") or request.add_special_tokens,
        return_offsets=request.return_offsets,
    )


METHODS: dict[str, tuple[type[Message], Method]] = {
    "GenerationService/Generate": (
        generation_service_pb2.GenerateRequest,
        lambda client, request, timeout_s: [client.generate(request, timeout_s=timeout_s)],
    ),
    "GenerationService/GenerateStream": (
        generation_service_pb2.GenerateRequest,
        lambda client, request, timeout_s: client.generate_stream(request, timeout_s=timeout_s),
    ),
    "GenerationService/Abort": (
        generation_service_pb2.AbortRequest,
        lambda client, request, timeout_s: [client.abort(request.request_ids)],
    ),
    "ChatService/Chat": (
        chat_service_pb2.ChatRequest,
        lambda client, request, timeout_s: [client.chat(request, timeout_s=timeout_s)],
    ),
    "ChatService/ChatStream": (
        chat_service_pb2.ChatRequest,
        lambda client, request, timeout_s: client.chat_stream(request, timeout_s=timeout_s),
    ),
    "TokenizationService/Tokenize": (tokenization_service_pb2.TokenizeRequest, tokenize),
    "TokenizationService/Detokenize": (
        tokenization_service_pb2.DetokenizeRequest,
        lambda client, request, timeout_s: [client.detokenize([sequence.ids for sequence in request.sequences])],
    ),
    "ModelService/ListModels": (model_service_pb2.ListModelsRequest, list_models),
}


@functools.cache
def client_of(token: str, client_class: str) -> Client:
    ca_file = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    return Client(sys.argv[1], client_class=client_class, credentials=Credentials(token, tls_ca_file=ca_file))


def run(call: dict[str, Any]) -> dict[str, Any]:
    request_class, method = METHODS[call["method"].removeprefix("stepwire.v1.")]
    metadata = call.get("metadata", {})
    token = metadata.get("authorization", "").removeprefix("Bearer ") or os.environ.get("STEPWIRE_TOKEN", "")
    client = client_of(token, metadata.get(CLIENT_CLASS_KEY, ""))
    request = ParseDict(call["request"], request_class())
    messages: list[dict[str, Any]] = []
    end = {"code": "OK"}
    try:
        # Letting go of the iterator cancels the call, as it does for every user of the client.
        for message in method(client, request, call.get("timeout_ms", 0) / 1000 or None):
            messages.append(MessageToDict(message, preserving_proto_field_name=True))
            if len(messages) == call.get("cancel_after_messages", 0):
                end["code"] = "CANCELLED"
                break
    except CallError as error:
        end = error_fields(error)
    return {"messages": messages, **end}


def error_fields(error: CallError) -> dict[str, Any]:
    details = error.details
    return {
        "code": error.code.name,
        "message": error.message,
        "reason": error.reason,
        "error_metadata": details.metadata,
        "retry_delay_ms": round(details.retry_after_s * 1000),
        "field_violations": [{"field": one.field, "description": one.description} for one in details.violations],
        "quota_violations": [{"subject": one.subject, "description": one.description} for one in details.quota],
        "pushback_ms": details.pushback_ms,
    }


def main() -> None:
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
