"""The body of /v1/embeddings as an EmbedRequest. Pure; names beyond OpenAI's are vLLM's."""

from __future__ import annotations

from typing import Literal

from frontend.api.openai_http.fields import Int32, Part, UInt32
from frontend.api.openai_http.prompts import Prompts, as_list
from stepwire.v1 import common_pb2
from stepwire.v1.embedding_service_pb2 import EmbedRequest

# What the caller calls fields of the message.
NAMES = {"inputs": "input"}


class EmbeddingBody(Part):
    """`user` and whatever else there is are ignored."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: UInt32 | None = None

    normalize: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    add_special_tokens: bool | None = None
    priority: Int32 | None = None

    def to_request(self) -> EmbedRequest:
        return EmbedRequest(
            model=self.model or "",
            inputs=[_to_input(one) for one in as_list(self.input)],
            dimensions=self.dimensions,
            normalize=self.normalize,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            add_special_tokens=self.add_special_tokens,
            priority=self.priority or 0,
        )


def _to_input(given: str | list[int]) -> EmbedRequest.Input:
    if isinstance(given, str):
        return EmbedRequest.Input(text=given)
    return EmbedRequest.Input(token_ids=common_pb2.TokenIds(ids=given))
