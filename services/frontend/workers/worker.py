"""One worker: `python -m frontend.workers.worker FD`, started by the supervisor, which FD is a socket to.

Everything but the metrics port, and for all but the first the admin port, is as in a frontend of one process. Signals
are the supervisor's: a terminal or a service manager sends them to every process, and a second one would end the drain.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from frontend.config import FrontendSettings
from frontend.event_loop import loop_factory
from frontend.process import FrontendProcess
from frontend.role import Role
from frontend.workers.control_channel import ControlChannel, Handler
from frontend.workers.metrics_sum import take_snapshot
from frontend.workers.worker_peers import WorkerPeers
from stepwire import log
from stepwire.listen_address import BindError


def main(args: Sequence[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(socket.socket(fileno=int(args[0]))))
    except BindError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


async def _serve(end: socket.socket) -> None:
    channel = await ControlChannel.open(end)
    hello = await channel.receive()
    role, settings = Role(**hello["role"]), FrontendSettings(**hello["settings"])
    log.configure(settings.log_level, settings.log_format, f"frontend-{role.number}")
    process = FrontendProcess(
        settings,
        WorkerPeers(channel),
        role,
        on_serving=lambda is_serving: channel.tell("serving", is_serving=is_serving),
    )

    def orphaned(_: object) -> None:
        # Without the supervisor nobody else would end this process.
        process.request_stop(at_once=True)

    talking = asyncio.create_task(channel.run(_Control(process).handlers()))
    talking.add_done_callback(orphaned)
    await process.start()
    channel.tell("listening", admin_port=process.admin_port)
    process.freeze_garbage()
    await process.run()
    talking.remove_done_callback(orphaned)
    talking.cancel()


class _Control:
    """What the supervisor asks."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self._frontend = process.frontend

    def handlers(self) -> dict[str, Handler]:
        names = ("stop", "ping", "snapshot", "tokens_emitted", "abort", "drain", "drain_status", "set_log_level")
        return {name: getattr(self, name) for name in names}

    async def stop(self, at_once: bool) -> None:
        self._process.request_stop(at_once=at_once)

    async def ping(self) -> bool:
        return True

    async def snapshot(self) -> Any:
        return take_snapshot(self._process.metrics.registry.collect())

    async def tokens_emitted(self, caller: str, request_id: str) -> int | None:
        return self._frontend.tokens_emitted(caller, request_id)

    async def abort(self, caller: str, request_ids: list[str]) -> list[str]:
        return self._frontend.abort_here(caller, request_ids)

    async def drain(self, timeout_s: float | None, reason: str) -> Any:
        self._process.drain.begin(timeout_s, reason)
        return astuple(self._process.drain.status)

    async def drain_status(self) -> Any:
        return astuple(self._process.drain.status)

    async def set_log_level(self, level: str, logger: str) -> None:
        logging.getLogger(logger or None).setLevel(level)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
