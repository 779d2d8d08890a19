"""One worker as the supervisor sees it: its process, the channel to it, and what it has said. Owner: the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict

from frontend.config import FrontendSettings
from frontend.role import Role
from frontend.workers.control_channel import ChannelClosedError, ControlChannel, Handler
from frontend.workers.metrics_sum import Snapshot
from stepwire.settings import environment_without_settings

logger = logging.getLogger(__name__)

# A scrape does without news of a worker that is this late.
SNAPSHOT_TIMEOUT_S = 2.0
PING_INTERVAL_S = 5.0
# The event loop of a worker is stuck, not busy, when it has not answered for this long.
ALIVE_S = 60.0


class WorkerHandle:
    """From its start to its end; a worker that is started in its place has another."""

    def __init__(self, process: asyncio.subprocess.Process, channel: ControlChannel) -> None:
        self.process = process
        self.channel = channel
        self.is_listening = False
        self.is_serving = False
        # The last one that it has answered with.
        self.snapshot: Snapshot = []

    @classmethod
    async def start(cls, role: Role, settings: FrontendSettings, environment: Mapping[str, str]) -> WorkerHandle:
        """A new interpreter, never a copy of this one: gRPC does not survive a fork. `environment` is added to ours.

        Raises OSError.
        """
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "frontend.workers.worker", str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(),),
                env={**environment_without_settings(), **environment},
            )  # fmt: skip
            channel = await ControlChannel.open(ours)
            undo.pop_all()
        channel.send({"role": asdict(role), "settings": settings.model_dump(mode="json")})
        return cls(process, channel)

    async def run(self, handlers: Mapping[str, Handler]) -> int:
        """Answer it until its end; returns its exit code, negative when a signal has ended it."""
        watching = asyncio.create_task(self._watch())
        talking = asyncio.create_task(self.channel.run(handlers))
        try:
            return await self.process.wait()
        finally:
            self.is_listening = self.is_serving = False
            watching.cancel()
            # Cancelled or not, it fails the calls that wait for an answer.
            talking.cancel()
            await asyncio.wait({watching, talking})

    def stop(self, *, at_once: bool) -> None:
        """Let it drain."""
        self.channel.tell("stop", at_once=at_once)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def fetch_snapshot(self) -> Snapshot:
        """Its metrics now, or as they last were."""
        with contextlib.suppress(TimeoutError, ChannelClosedError):
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                self.snapshot = await self.channel.call("snapshot")
        return self.snapshot

    async def _watch(self) -> None:
        """A worker that is stuck still listens and would keep its callers waiting: it is replaced."""
        try:
            while True:
                async with asyncio.timeout(ALIVE_S):
                    await self.channel.call("ping")
                await asyncio.sleep(PING_INTERVAL_S)
        except TimeoutError:
            logger.error("worker process %d has not answered for %g s", self.process.pid, ALIVE_S)
            self.kill()
        except ChannelClosedError:
            pass
