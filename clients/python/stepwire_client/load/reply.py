"""What came of one request, as times; and the interface of what it is sent to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from stepwire_client.load.workload import LoadRequest


class RequestFailed(Exception):
    """The request has no complete answer. `reason` is short, and equal for equal faults: failures are counted by it."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


@dataclass(slots=True)
class Reply:
    """Times of `time.perf_counter`. Answers that failed count as failures and nowhere else."""

    # When it was due: in an open loop what the client is late with is waiting time, as for a user.
    started: float
    # One for each message that brought tokens.
    chunk_times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    ended: float = 0.0
    failure: str = ""
    failure_message: str = ""


class Target(Protocol):
    """A server that answers one kind of request."""

    async def complete(self, request: LoadRequest, reply: Reply) -> None:
        """Send it, note the time of each chunk and the number of tokens. Raises RequestFailed."""

    async def close(self) -> None: ...
