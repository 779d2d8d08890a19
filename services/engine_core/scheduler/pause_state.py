"""How much of the scheduler a pause holds back. Pure; set by the busy-loop thread between two steps."""

from __future__ import annotations

import enum


class PauseState(enum.Enum):
    """Adds are queued and deadlines run in every state."""

    NONE = enum.auto()
    # Requests that were scheduled before go on to their end; no other request is admitted.
    NEW = enum.auto()
    # No request gets any token.
    ALL = enum.auto()
