"""Fields of the public API that this build does not serve: refused by name, never silently ignored."""

from __future__ import annotations

from collections.abc import Iterator

from frontend.input_processor.model_facts import ModelFacts
from stepwire.errors import FieldViolation, InvalidRequestError
from stepwire.v1 import generation_service_pb2


def refuse_unsupported(request: generation_service_pb2.GenerateRequest, facts: ModelFacts) -> None:
    """Raise UNSUPPORTED_FEATURE with every such field the request uses."""
    fields = tuple(_unsupported_fields(request, facts))
    if fields:
        raise InvalidRequestError(
            f"not supported by this server: {', '.join(fields)}",
            reason="UNSUPPORTED_FEATURE",
            violations=tuple(FieldViolation(field, "not supported by this server") for field in fields),
        )


def _unsupported_fields(request: generation_service_pb2.GenerateRequest, facts: ModelFacts) -> Iterator[str]:
    constraint = request.structured_output.WhichOneof("spec")
    if _asks_for_joined_special_tokens(request):
        yield "output.spaces_between_special_tokens"
    if constraint is not None and constraint not in facts.structured_output_kinds:
        yield f"structured_output.{constraint}"
    if request.kv.HasField("transfer_params"):
        yield "kv.transfer_params"
    if request.lora_name:
        yield "lora_name"
    if request.priority and not facts.has_priorities:
        yield "priority"


def _asks_for_joined_special_tokens(request: generation_service_pb2.GenerateRequest) -> bool:
    """The decoder puts spaces where the model's tokenizer does; without special tokens in the text nothing changes."""
    output = request.output
    is_false = output.HasField("spaces_between_special_tokens") and not output.spaces_between_special_tokens
    shows_special_tokens = output.HasField("skip_special_tokens") and not output.skip_special_tokens
    return is_false and shows_special_tokens
