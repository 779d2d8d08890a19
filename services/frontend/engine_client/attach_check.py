"""Whether an engine may join the others of this frontend. Pure: raises EngineRefusedError, which says why not."""

from __future__ import annotations

from collections.abc import Iterable

from frontend.engine_client.connection_state import EngineRefusedError
from frontend.engine_client.engine_facts import EngineFacts


def check_identity(endpoint: str, facts: EngineFacts, boots: Iterable[tuple[str, tuple[str, str]]]) -> None:
    """An engine is attached once, and its id names it alone. `boots`: address and boot of the others attached now."""
    for other_endpoint, boot in boots:
        if boot == facts.boot:
            raise EngineRefusedError(
                f"{endpoint} is engine {facts.engine_id}, which is attached at {other_endpoint} already",
                reason="ENGINE_ID_TAKEN",
            )
        if boot[0] == facts.engine_id:
            raise EngineRefusedError(
                f"the engines at {endpoint} and {other_endpoint} both call themselves {facts.engine_id}; "
                "give each an --engine-id of its own",
                reason="ENGINE_ID_TAKEN",
            )


def check_agreement(endpoint: str, facts: EngineFacts, others: Iterable[EngineFacts]) -> None:
    """Equal requests must get equal answers from every engine."""
    for other in others:
        reason = _difference(facts, other)
        if reason:
            raise EngineRefusedError(
                f"engine {endpoint} serves {_describe(facts)}, but engine {other.engine_id} serves "
                f"{_describe(other)}; the engines of one frontend must agree",
                reason=reason,
            )


def _difference(one: EngineFacts, other: EngineFacts) -> str:
    if (one.model, one.revision) != (other.model, other.revision):
        return "MODEL_MISMATCH"
    if one.tokenizer_sha256 != other.tokenizer_sha256:
        return "TOKENIZER_MISMATCH"
    if one.weight_version != other.weight_version:
        return "WEIGHTS_MISMATCH"
    # One that does not pool is no contradiction: nobody asks it, nor the others, for vectors then.
    return "POOLING_MISMATCH" if one.pooling and other.pooling and one.pooling != other.pooling else ""


def _describe(facts: EngineFacts) -> str:
    return (
        f"{facts.model} (revision {facts.revision or 'unknown'}, tokenizer {facts.tokenizer_sha256[:12] or 'unknown'}, "
        f"weights {facts.weight_version or 'as loaded'}, pooling {facts.pooling or 'off'})"
    )
