"""The other processes of this frontend, as one of them sees them. Owner: the event loop.

A frontend of one process has none, and nothing is awaited for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """How far a drain has come, in one process or in several."""

    is_draining: bool
    num_requests: int
    # Until running requests are cut.
    remaining_s: float

    def __add__(self, other: DrainStatus) -> DrainStatus:
        return DrainStatus(
            self.is_draining or other.is_draining,
            self.num_requests + other.num_requests,
            max(self.remaining_s, other.remaining_s),
        )


NO_DRAIN = DrainStatus(is_draining=False, num_requests=0, remaining_s=0.0)


class Peers(Protocol):
    """What one process asks the others."""

    async def claim(self, caller: str, request_id: str) -> int | None:
        """This request begins here: None, or the tokens that another process has emitted of one with the same id."""

    def release(self, caller: str, request_id: str) -> None:
        """It has ended. Never waits."""

    async def abort(self, caller: str, request_ids: Sequence[str]) -> set[str]:
        """Abort what others run of these; returns the ids that were live there."""

    async def drain(self, timeout_s: float | None, reason: str) -> DrainStatus:
        """Let the others drain too; returns what they have in flight."""

    async def drain_status(self) -> DrainStatus:
        """Of the others."""

    async def set_log_level(self, level: str, logger: str) -> None:
        """Of the others too."""


class NoPeers:
    """Of a frontend of one process."""

    async def claim(self, caller: str, request_id: str) -> int | None:
        return None

    def release(self, caller: str, request_id: str) -> None:
        pass

    async def abort(self, caller: str, request_ids: Sequence[str]) -> set[str]:
        return set()

    async def drain(self, timeout_s: float | None, reason: str) -> DrainStatus:
        return NO_DRAIN

    async def drain_status(self) -> DrainStatus:
        return NO_DRAIN

    async def set_log_level(self, level: str, logger: str) -> None:
        pass
