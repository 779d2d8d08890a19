"""The end of a streamed answer over HTTP, before a client that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

from frontend.api.openai_http.answer import COMPLETION, AnswerResponse


class FinishedRun:
    """A run that writes one part and is over."""

    load_format = None

    def __init__(self, write_timeout_s: float) -> None:
        model = SimpleNamespace(facts=SimpleNamespace(model="m"))
        self.generation = SimpleNamespace(
            model=model, system_fingerprint="f", engine_id="e", write_timeout_s=write_timeout_s
        )

    async def run(self, write: Callable) -> None:
        await write(self, [{"index": 0, "text": "x"}])


async def test_the_end_of_a_stream_waits_for_a_client_that_does_not_read_no_longer_than_its_limit() -> None:
    never, sent = asyncio.Event(), []

    async def send(message: dict) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            await never.wait()

    async def receive() -> dict:
        await never.wait()
        return {"type": "http.disconnect"}

    response = AnswerResponse(COMPLETION, "r", [FinishedRun(0.01)], is_stream=True, includes_usage=False, names={})
    async with asyncio.timeout(30):
        await response({"type": "http"}, receive, send)
    assert sent[-1]["body"] == b"data: [DONE]\n\n"
