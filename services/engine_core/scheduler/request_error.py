"""Why a request failed, as the engine says it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why one request failed or was refused: the fields of stepwire.v1.EngineError."""

    reason: str
    message: str
    retryable: bool = False
    retry_after_ms: int = 0
    cause_type: str = ""
