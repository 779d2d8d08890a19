"""`stepwire embed`: texts as vectors, one line each."""

from __future__ import annotations

from typing import Annotated

import typer

from stepwire.v1 import embedding_service_pb2
from stepwire_client import cli_input, cli_options, cli_printing
from stepwire_client.cli_session import connected
from stepwire_client.short_calls import DEFAULT_TARGET

Texts = Annotated[
    list[str] | None, typer.Argument(parser=cli_input.text, help="Texts to embed; nothing = standard input, whole.")
]
Dimensions = Annotated[int | None, typer.Option(min=1, max=2**32 - 1, help="Only the first so many of a vector.")]
Normalize = Annotated[bool | None, typer.Option(help="Scale to unit length; default: as the model asks for.")]


def embed(
    texts: Texts = None,
    target: cli_options.Target = DEFAULT_TARGET,
    timeout: cli_options.Timeout = None,
    json: cli_options.Json = False,
    model: cli_options.Model = "",
    request_id: cli_options.RequestId = "",
    dimensions: Dimensions = None,
    normalize: Normalize = None,
    add_special_tokens: cli_options.AddSpecialTokens = None,
    truncate_prompt_tokens: cli_options.TruncatePromptTokens = None,
    priority: cli_options.Priority = None,
    client_class: cli_options.ClientClass = "",
) -> None:
    """Turn texts into vectors: a line of numbers for each."""
    to_embed = texts or [cli_input.read_stdin("no text: give one, or pipe one in")]
    request = embedding_service_pb2.EmbedRequest(
        request_id=request_id,
        model=model,
        inputs=[embedding_service_pb2.EmbedRequest.Input(text=text) for text in to_embed],
        dimensions=dimensions,
        normalize=normalize,
        add_special_tokens=add_special_tokens,
        truncate_prompt_tokens=truncate_prompt_tokens,
        priority=priority or 0,
    )
    with connected(target, timeout, client_class) as client:
        response = client.embed(request, timeout_s=timeout)
        if json:
            cli_printing.write_json(response)
            return
        for embedding in response.embeddings:
            # As many digits as a float32 has.
            cli_printing.write_text(" ".join(f"{value:.9g}" for value in embedding.values) + "\n")
        num_values = len(response.embeddings[0].values) if response.embeddings else 0
        cli_printing.note(f"{response.usage.prompt_tokens} tokens, {num_values} dimensions")
