"""Requests whose clients will not wait for the end, and their messages in every protocol that the frontend speaks."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from smg_grpc_proto import vllm_engine_pb2

from stepwire.v1 import chat_service_pb2, common_pb2, embedding_service_pb2, generation_service_pb2

WAYS = ("unary", "stream", "chat", "chat_stream", "gateway_stream", "embed", "http", "http_stream", "http_chat")
ENDS = ("cancel", "deadline", "disconnect", "abort", "none")
# Most awaits of a handler are in its first turns.
_TURNS = (0, 1, 2, 3, 5, 8, 13, 30, 100, 300)
_REGEX = "[a-z]{1,40}"


@dataclass(frozen=True)
class Visit:
    """One request and the end that its client has in mind."""

    name: str
    way: str
    end: str
    num_turns: int
    num_messages: int
    timeout_s: float
    num_choices: int
    max_tokens: int
    stop: tuple[str, ...]
    has_logprobs: bool
    has_grammar: bool


def draw_visit(rng: random.Random, name: str) -> Visit:
    way = rng.choice(WAYS)
    # Over HTTP a client has no deadline and no way to cancel but to go.
    end = rng.choice(ENDS) if not way.startswith("http") else rng.choice(("disconnect", "disconnect", "abort", "none"))
    return Visit(
        name,
        way,
        end,
        num_turns=rng.choice(_TURNS),
        num_messages=rng.choice((0, 0, 1, 2, 5)),
        timeout_s=rng.choice((0.001, 0.05, 0.052, 0.06, 0.1, 0.2)),
        num_choices=rng.choice((1, 1, 1, 2, 3)),
        max_tokens=rng.choice((1, 5, 50, 150)),
        stop=tuple(rng.sample(("e", "lo", "zz", "\n"), rng.choice((0, 0, 1, 2)))),
        has_logprobs=rng.random() < 0.2,
        has_grammar=rng.random() < 0.1,
    )


def generate_request(visit: Visit) -> generation_service_pb2.GenerateRequest:
    return generation_service_pb2.GenerateRequest(
        request_id=visit.name, text=f"hello world {visit.name}", **_parameters(visit)
    )


def chat_request(visit: Visit) -> chat_service_pb2.ChatRequest:
    part = chat_service_pb2.ContentPart(text=f"hello {visit.name}")
    message = chat_service_pb2.Message(role=chat_service_pb2.ROLE_USER, content=[part])
    return chat_service_pb2.ChatRequest(request_id=visit.name, messages=[message], **_parameters(visit))


def embed_request(visit: Visit) -> embedding_service_pb2.EmbedRequest:
    # Some take several steps.
    texts = [f"{visit.name} " + "hello " * (visit.max_tokens // 10)] * visit.num_choices
    return embedding_service_pb2.EmbedRequest(
        request_id=visit.name, inputs=[embedding_service_pb2.EmbedRequest.Input(text=text) for text in texts]
    )


def gateway_request(visit: Visit) -> vllm_engine_pb2.GenerateRequest:
    sampling = {"n": visit.num_choices, "temperature": 1.0, "seed": 7, "max_tokens": visit.max_tokens}
    return vllm_engine_pb2.GenerateRequest(
        request_id=visit.name,
        text="hello world",
        stream=visit.num_turns % 2 == 0,
        sampling_params=vllm_engine_pb2.SamplingParams(**sampling, stop=visit.stop),
    )


def _parameters(visit: Visit) -> dict[str, object]:
    return {
        "sampling": common_pb2.SamplingParams(n=visit.num_choices, temperature=1, seed=7),
        "stop": common_pb2.StopConditions(max_tokens=visit.max_tokens, stop=visit.stop),
        "output": common_pb2.OutputOptions(token_ids=True, logprobs=2 if visit.has_logprobs else None),
        "structured_output": common_pb2.StructuredOutput(regex=_REGEX) if visit.has_grammar else None,
    }


def http_request(visit: Visit) -> bytes:
    is_chat = visit.way == "http_chat"
    body: dict[str, object] = {
        "n": visit.num_choices,
        "max_tokens": visit.max_tokens,
        "stop": list(visit.stop),
        "stream": visit.way != "http",
        "seed": 7,
        "guided_regex": _REGEX if visit.has_grammar else None,
        "logprobs": (True if is_chat else 2) if visit.has_logprobs else None,
    }
    body |= {"messages": [{"role": "user", "content": "hello"}]} if is_chat else {"prompt": ["hello", "world"]}
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
    return f"{head}x-request-id: {visit.name}\r\n\r\n".encode() + data
