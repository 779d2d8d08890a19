"""vLLM's EmbedRequest as stepwire's own, and the answer as theirs. Pure."""

from __future__ import annotations

from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from frontend.api.embedding import floats
from frontend.api.embedding_run import Embedded
from stepwire.errors import InvalidRequestError
from stepwire.v1 import common_pb2
from stepwire.v1.embedding_service_pb2 import EmbedRequest


def to_embed_request(request: Any) -> EmbedRequest:
    """One input, by its ids. Raises InvalidRequestError."""
    if not request.HasField("tokenized"):
        raise InvalidRequestError.of_field("tokenized", "is not set")
    token_ids = common_pb2.TokenIds(ids=request.tokenized.input_ids)
    return EmbedRequest(inputs=[EmbedRequest.Input(token_ids=token_ids)])


def to_embed_response(embedded: Embedded) -> Any:
    [vector] = embedded.vectors
    values = floats(vector.values)
    return pb.EmbedResponse(embedding=values, prompt_tokens=embedded.num_prompt_tokens, embedding_dim=len(values))
