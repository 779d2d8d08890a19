"""An EmbedRequest as what the engines are asked: one prompt for each input, and how all of them are pooled. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.input_processor.field_checks import FieldChecks
from frontend.input_processor.model_facts import ModelFacts
from stepwire.engine.v1.engine_core_pb2 import PoolingParams
from stepwire.errors import InvalidRequestError
from stepwire.v1 import common_pb2
from stepwire.v1.embedding_service_pb2 import EmbedRequest
from stepwire.v1.generation_service_pb2 import GenerateRequest

# OpenAI's.
MAX_INPUTS = 2048
# Of all vectors of an answer, which has to fit a message in any encoding.
MAX_VECTOR_BYTES = 32 * 1024 * 1024

_TASK = "embed"
_BYTES_PER_VALUE = 4


@dataclass(frozen=True, slots=True)
class PooledPrompts:
    """The prompts in the order of the inputs."""

    pooling: PoolingParams
    prompts: list[GenerateRequest]


def read_embed_request(request: EmbedRequest, facts: ModelFacts, max_requests: int) -> PooledPrompts:
    """What can be said of all inputs together is checked; of each one, when it is processed.

    `max_requests`: more are never in flight here. Raises InvalidRequestError.
    """
    if not facts.embedding_dimensions:
        raise InvalidRequestError("the model served here does not pool", reason="UNSUPPORTED_FEATURE")
    checks = FieldChecks()
    limit, count = min(MAX_INPUTS, max_requests), len(request.inputs)
    checks.require(1 <= count <= limit, "inputs", f"{count} inputs; 1 up to {limit} are allowed")
    pooling = PoolingParams(task=_TASK)
    if request.HasField("normalize"):
        pooling.normalize = request.normalize
    if request.HasField("dimensions"):
        pooling.dimensions = request.dimensions
        checks.integer("dimensions", request.dimensions, 1, facts.embedding_dimensions)
    num_bytes = count * (pooling.dimensions or facts.embedding_dimensions) * _BYTES_PER_VALUE
    if count <= limit and num_bytes > MAX_VECTOR_BYTES:
        checks.add("inputs", f"{count} vectors have {num_bytes} bytes, at most {MAX_VECTOR_BYTES} fit one answer")
    checks.raise_if_any()
    return PooledPrompts(pooling, [_prompt_of(request, one) for one in request.inputs])


def _prompt_of(request: EmbedRequest, given: EmbedRequest.Input) -> GenerateRequest:
    prompt = GenerateRequest(
        model=request.model,
        priority=request.priority,
        # Neither text nor ids come back.
        output=common_pb2.OutputOptions(text=False, token_ids=False),
    )
    match given.WhichOneof("input"):
        case "text":
            prompt.text = given.text
        case "token_ids":
            prompt.token_ids.CopyFrom(given.token_ids)
    for name in ("truncate_prompt_tokens", "add_special_tokens"):
        if request.HasField(name):
            setattr(prompt, name, getattr(request, name))
    return prompt
