"""How an answer is worked out and sent by a response that runs by itself. Owner: the task of the request.

A client that goes away cancels the work, and with it whatever the engines do for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine

from starlette.types import Receive, Send

Headers = dict[str, str]


async def run_until_gone(work: Coroutine[object, object, None], receive: Receive) -> None:
    """All of the work inside of one task, which a disconnect cancels."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait({task, gone})
    if not task.cancelled():
        task.result()


async def start(status: int, headers: Headers, send: Send) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_whole(status: int, body: bytes, headers: Headers, send: Send) -> None:
    """A JSON body at once."""
    await start(status, {"content-type": "application/json", "content-length": str(len(body)), **headers}, send)
    await send({"type": "http.response.body", "body": body})


def to_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
