"""A drain that an operator asks for: new requests are refused, running ones finish, the process stays. Event loop only.

A signal drains in the same way and then ends the process; it may come before, during or after this.
"""

from __future__ import annotations

import asyncio
import logging
import time

from frontend.llm_frontend import LLMFrontend
from frontend.peers import DrainStatus

logger = logging.getLogger(__name__)


class FrontendDrain:
    """Begun once; a second call can only shorten it."""

    def __init__(self, frontend: LLMFrontend, default_timeout_s: float) -> None:
        self._frontend = frontend
        self._default_timeout_s = default_timeout_s
        self._deadline: float | None = None
        self._cutting: asyncio.Task[None] | None = None

    @property
    def status(self) -> DrainStatus:
        """Of this process; no time remains when there is no drain, or nothing to cut."""
        num_requests = self._frontend.num_in_flight
        is_limited = self._deadline is not None and num_requests > 0
        remaining_s = max(0.0, (self._deadline or 0.0) - time.monotonic()) if is_limited else 0.0
        return DrainStatus(self._frontend.is_draining, num_requests, remaining_s)

    def begin(self, timeout_s: float | None, reason: str) -> int:
        """Refuse from now on, cut what still runs after the time; returns how many requests are in flight."""
        deadline = time.monotonic() + (self._default_timeout_s if timeout_s is None else timeout_s)
        if self._deadline is None or deadline < self._deadline:
            self._deadline = deadline
            self.close()
            self._cutting = asyncio.create_task(self._cut_at(deadline))
        logger.info("draining for up to %.1f s: %s", self.status.remaining_s, reason)
        self._frontend.begin_drain()
        return self.status.num_requests

    def close(self) -> None:
        """The process ends, or a shorter time holds."""
        if self._cutting is not None:
            self._cutting.cancel()

    async def _cut_at(self, deadline: float) -> None:
        await asyncio.sleep(deadline - time.monotonic())
        self._frontend.cut_all()
