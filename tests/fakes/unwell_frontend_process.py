"""The real frontend, whose loop is blocked, whose memory grows and whose detokenizer fails."""

from __future__ import annotations

import asyncio
import sys
import time

from fakes import unwell
from frontend.__main__ import main
from frontend.choice_state import ChoiceState
from frontend.process import FrontendProcess

BLOCK_S, PAUSE_S = 0.25, 0.3

_start = FrontendProcess.start
_blockers: list[asyncio.Task[None]] = []


async def start_and_block(self: FrontendProcess) -> None:
    await _start(self)
    # Not before: what has grown when it is first scraped grows too late.
    unwell.leak()
    _blockers.append(asyncio.create_task(block()))


async def block() -> None:
    while True:
        await asyncio.sleep(PAUSE_S)
        time.sleep(BLOCK_S)  # noqa: ASYNC251  it is the fault


def fail(self: ChoiceState, output: object) -> None:
    raise RuntimeError("injected failure")


if __name__ == "__main__":
    FrontendProcess.start = start_and_block  # type: ignore[method-assign]
    ChoiceState.process = fail  # type: ignore[method-assign,assignment]
    unwell.collect_much_garbage()
    sys.exit(main())
