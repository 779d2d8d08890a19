"""Composition root of the frontend: settings, logging, event loop, signals, exit code."""

from __future__ import annotations

# Before all that takes time to import.
import stepwire.early_stop  # noqa: F401

# isort: split
import asyncio
import signal
import sys

from frontend.config import FrontendSettings
from frontend.event_loop import loop_factory
from frontend.parent_watch import watch_parent
from frontend.process import FrontendProcess
from frontend.workers import supervisor
from stepwire import log
from stepwire.listen_address import BindError


def main(args: list[str] | None = None) -> int:
    """Run until told to stop; the exit code is 0 after an orderly end and 1 when a port is not to be had."""
    settings = FrontendSettings.from_command_line(args)
    log.configure(settings.log_level, settings.log_format, "frontend")
    if settings.workers > 1:
        return supervisor.run(settings)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
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
        watch_parent(lambda: loop.call_soon_threadsafe(lambda: process.request_stop(at_once=True)))
    process.freeze_garbage()
    await process.run()


if __name__ == "__main__":
    raise SystemExit(main())
