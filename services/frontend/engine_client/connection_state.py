"""The words a connection and its pool share: its states, who we are, and the refusal of an engine. Values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from stepwire.errors import StepwireError, UnavailableError
from stepwire.tls import TlsFiles


class ConnectionState(enum.Enum):
    """Where a connection is in its life."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"
    CLOSED = "closed"


REFUSAL_REASONS = (
    "MODEL_MISMATCH",
    "TOKENIZER_MISMATCH",
    "TOKENIZER_UNUSABLE",
    "WEIGHTS_MISMATCH",
    "POOLING_MISMATCH",
    "PROTOCOL_VERSION",
    "ENGINE_ID_TAKEN",
)


class EngineRefusedError(StepwireError):
    """This engine must not serve here: another model, tokenizer or protocol. Asked again later, without hurry."""

    default_reason = "MODEL_MISMATCH"


class EngineStartTimeout(UnavailableError):
    """No Ready within ready_timeout_s. The message says what to look at; it is tried again."""


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """Who this frontend is towards engines."""

    client_id: str
    # Random for each boot.
    session_id: str
    # Empty = any.
    expect_model: str
    # How engines are spoken to; None = in clear.
    tls: TlsFiles | None = None
    # In their certificates; empty = their address.
    tls_server_name: str = ""
