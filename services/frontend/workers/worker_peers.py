"""The other workers, as one of them sees them: through the supervisor. Owner: the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.peers import DrainStatus
from frontend.workers.control_channel import ChannelClosedError, ControlChannel
from stepwire.errors import UnavailableError


class WorkerPeers:
    """Peers. Without the supervisor this worker ends too, so that whatever needs it is refused as at a drain."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel

    async def claim(self, caller: str, request_id: str) -> int | None:
        tokens_emitted: int | None = await self._ask("claim", caller=caller, request_id=request_id)
        return tokens_emitted

    def release(self, caller: str, request_id: str) -> None:
        self._channel.tell("release", caller=caller, request_id=request_id)

    async def abort(self, caller: str, request_ids: Sequence[str]) -> set[str]:
        return set(await self._ask("abort", caller=caller, request_ids=list(request_ids)))

    async def drain(self, timeout_s: float | None, reason: str) -> DrainStatus:
        return DrainStatus(*await self._ask("drain", timeout_s=timeout_s, reason=reason))

    async def drain_status(self) -> DrainStatus:
        return DrainStatus(*await self._ask("drain_status"))

    async def set_log_level(self, level: str, logger: str) -> None:
        await self._ask("set_log_level", level=level, logger=logger)

    async def _ask(self, name: str, **arguments: Any) -> Any:
        try:
            return await self._channel.call(name, **arguments)
        except ChannelClosedError:
            raise UnavailableError("this frontend is shutting down", reason="DRAINING") from None
