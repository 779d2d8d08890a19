"""An OpenAI-compatible completions endpoint on a socket, scripted by a test: one event a token, then the usage."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


class FakeOpenAIServer:
    """What requests get: events of `max_tokens` tokens, or what a test has put in their place."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, object]] = []
        self.status = 200
        # Instead of the tokens; an event that is no dict is written as it is.
        self.events: list[dict[str, object] | str] | None = None

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.Response(status=self.status, text="full")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self.answer(body["max_tokens"]) if self.events is None else self.events:
            line = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {line}\n\n".encode())
        return response

    @staticmethod
    def answer(num_tokens: int) -> list[dict[str, object] | str]:
        tokens = [token_event("" if index == 1 else "a") for index in range(num_tokens)]
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens}}
        return [*tokens, token_event("", "length"), usage, "[DONE]"]


def token_event(text: str, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


@contextmanager
def running() -> Iterator[FakeOpenAIServer]:
    """The server on a loopback port, in a thread of its own."""
    fake, loop = FakeOpenAIServer(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.complete)
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        fake.url = f"http://{host}:{port}"

    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
