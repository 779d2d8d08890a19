"""Any OpenAI-compatible completions endpoint with server-sent events as the target of a load.

So that other servers are measured by the same client. Needs aiohttp (`pip install stepwire[bench]`).
"""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp
from aiohttp.http import HttpProcessingError

from stepwire_client.credentials import Credentials
from stepwire_client.load.reply import Reply, RequestFailed
from stepwire_client.load.workload import LoadRequest

_DONE = b"[DONE]"
_COMPLETE = {"stop", "length"}


class HttpTarget:
    """One session with one server; greedy requests with prompts as token ids. Made inside the event loop."""

    def __init__(self, url: str, *, model: str, ignore_eos: bool, timeout_s: float, credentials: Credentials) -> None:
        self._url = url.rstrip("/") + "/v1/completions"
        self._fields: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # The load bounds the number of connections, and nothing here may queue requests behind its back.
        connector = aiohttp.TCPConnector(limit=0, ssl=credentials.ssl_context() if credentials.has_tls else True)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s), headers=dict(credentials.metadata)
        )

    async def complete(self, request: LoadRequest, reply: Reply) -> None:
        body = {**self._fields, "prompt": list(request.prompt_token_ids), "max_tokens": request.max_tokens}
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    raise RequestFailed(f"HTTP_{response.status}", (await response.text())[:400])
                await _read_events(response.content, reply)
        except TimeoutError as error:
            raise RequestFailed("DEADLINE") from error
        except aiohttp.ClientError as error:
            raise RequestFailed(type(error).__name__, str(error)) from error
        except (HttpProcessingError, ValueError) as error:
            # A line longer than aiohttp's buffer, which is far more than an event of one token.
            raise RequestFailed("BAD_EVENT", f"the stream can not be read: {error}") from error

    async def close(self) -> None:
        await self._session.close()


async def _read_events(lines: aiohttp.StreamReader, reply: Reply) -> None:
    finish_reason = None
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == _DONE:
            break
        event = _decode(data)
        try:
            finish_reason = _read_event(event, reply) or finish_reason
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise RequestFailed("BAD_EVENT", f"an event is no completion: {str(event)[:400]}") from error
    if finish_reason is None:
        raise RequestFailed("INCOMPLETE", "the stream ended without a finish reason")
    if finish_reason not in _COMPLETE:
        raise RequestFailed(f"FINISH_REASON_{finish_reason.upper()}")
    # A server that tells no usage is taken to send one token an event.
    reply.num_tokens = reply.num_tokens or len(reply.chunk_times)


def _read_event(event: dict[str, Any], reply: Reply) -> str | None:
    """Note its tokens; returns the finish reason, if it tells one."""
    finish_reason = None
    if usage := event.get("usage"):
        reply.num_tokens = int(usage["completion_tokens"])
    # Null is as good as none.
    for choice in event.get("choices") or ():
        # An empty text is a token too (half a character), unless the event only tells the end.
        if choice.get("text") or not choice.get("finish_reason"):
            reply.chunk_times.append(time.perf_counter())
        if choice.get("finish_reason"):
            finish_reason = str(choice["finish_reason"])
    return finish_reason


def _decode(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise RequestFailed("BAD_EVENT", "an event of the stream is no JSON") from error
    if not isinstance(event, dict) or event.get("error"):
        raise RequestFailed("SERVER_ERROR", str(event)[:400])
    return event
