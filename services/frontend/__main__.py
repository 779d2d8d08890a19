"""Composition root of the frontend: settings, logging, event loop, signals, exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from frontend.config import FrontendSettings
from frontend.process import FrontendProcess
from stepwire import log
from stepwire.listen_address import BindError

logger = logging.getLogger(__name__)

STDIN = 0


def main(args: list[str] | None = None) -> int:
    """Run until told to stop; the exit code is 0 after an orderly end and 1 when a port is not to be had."""
    settings = FrontendSettings.from_command_line(args)
    log.configure(settings.log_level, settings.log_format, "frontend")
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(settings))
    except BindError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


async def _serve(settings: FrontendSettings) -> None:
    process = FrontendProcess(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.request_stop)
    await process.start()
    if settings.owner == "parent":
        _watch_parent(lambda: loop.call_soon_threadsafe(lambda: process.request_stop(at_once=True)))
    process.freeze_garbage()
    await process.run()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _watch_parent(on_end: Callable[[], object]) -> None:
    """Call `on_end` when the pipe on stdin reaches its end, which it does when the parent is gone, however it went."""

    def watch() -> None:
        # Not sys.stdin: its lock would be held by this thread when the interpreter ends.
        while os.read(STDIN, 1024):
            pass
        logger.info("the parent is gone")
        on_end()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    raise SystemExit(main())
