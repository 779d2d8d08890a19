"""The answer to one call of /v1/completions or /v1/chat/completions: whole, or streamed as server-sent events.

The status is sent with the first output, so that whatever goes wrong before has one of its own. Afterwards an error is
an event, and the stream ends without [DONE]. A client that goes away cancels the work, and with it the generation.
Owner: the task of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.api.answering import STATUS_TIMEOUT_S
from frontend.api.load_report import load_headers
from frontend.api.logprobs_messages import MAX_ENTRIES_OF_ANSWER, MAX_ENTRIES_ON_LOOP
from frontend.api.openai_http.errors import headers_of, status_of, to_body
from frontend.api.openai_http.merging import WholeChoices
from frontend.api.openai_http.run import Choice, Run
from frontend.api.openai_http.sending import Headers, run_until_gone, send_whole, start, to_json
from stepwire.errors import InvalidRequestError, StepwireError

_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class AnswerKind:
    """The words in which completions and chats differ."""

    id_prefix: str
    whole_object: str
    part_object: str
    is_chat: bool


COMPLETION = AnswerKind("cmpl-", "text_completion", "text_completion", is_chat=False)
CHAT = AnswerKind("chatcmpl-", "chat.completion", "chat.completion.chunk", is_chat=True)


class AnswerResponse(Response):
    """Runs when it is called, all of it inside of one task that a disconnect cancels."""

    def __init__(
        self,
        kind: AnswerKind,
        request_id: str,
        runs: Sequence[Run[Any]],
        *,
        is_stream: bool,
        includes_usage: bool,
        names: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._kind = kind
        self._request_id = request_id
        self._runs = runs
        self._is_stream = is_stream
        self._includes_usage = includes_usage
        # What the caller calls fields of the gRPC message.
        self._names = names
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_gone(self._stream(send) if self._is_stream else self._answer(send), receive)

    async def _answer(self, send: Send) -> None:
        whole = WholeChoices()
        num_entries = 0

        async def collect(run: Run[Any], choices: list[Choice]) -> None:
            nonlocal num_entries
            num_entries += sum(map(_num_entries, choices))
            if num_entries > MAX_ENTRIES_OF_ANSWER:
                raise InvalidRequestError.of_field(
                    "output.logprobs", f"more than {MAX_ENTRIES_OF_ANSWER} entries do not fit one answer; stream it"
                )
            whole.add(choices)

        error = await _run_all(self._runs, collect)
        if error is not None:
            await self._send_error(error, send)
            return
        choices = whole.chats() if self._kind.is_chat else whole.completions()
        answer = {**self._frame(self._runs[0], self._kind.whole_object, choices), "usage": self._usage()}
        body = await asyncio.to_thread(to_json, answer) if num_entries > MAX_ENTRIES_ON_LOOP else to_json(answer)
        await send_whole(200, body, self._ids_of(self._runs[0]), send)

    async def _stream(self, send: Send) -> None:
        lock = asyncio.Lock()
        has_begun = False

        async def write(run: Run[Any], choices: list[Choice]) -> None:
            nonlocal has_begun
            # The runs of one call take turns: none may write between the two messages of another.
            async with lock:
                if not has_begun:
                    has_begun = True
                    await start(200, {**_EVENTS, **self._ids_of(run)}, send)
                events = b"".join(self._event(run, [choice]) for choice in choices)
                await send({"type": "http.response.body", "body": events, "more_body": True})

        error = await _run_all(self._runs, write)
        if error is None:
            last = b"data: [DONE]\n\n"
            if self._includes_usage:
                last = self._event(self._runs[0], [], usage=self._usage()) + last
        elif has_begun:
            last = b"event: error\ndata: " + to_json(to_body(error, self._names)) + b"\n\n"
        else:
            await self._send_error(error, send)
            return
        # A client that does not read, perhaps cut for that before, would never take it.
        timeout_s = STATUS_TIMEOUT_S if error else self._runs[0].generation.write_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await send({"type": "http.response.body", "body": last})

    def _event(self, run: Run[Any], choices: list[Choice], usage: dict[str, Any] | None = None) -> bytes:
        frame = self._frame(run, self._kind.part_object, choices)
        if self._includes_usage:
            frame["usage"] = usage
        return b"data: " + to_json(frame) + b"\n\n"

    def _frame(self, run: Run[Any], name: str, choices: list[Choice]) -> dict[str, Any]:
        return {
            "id": self._kind.id_prefix + self._request_id,
            "object": name,
            "created": self._created,
            "model": run.generation.model.facts.model,
            "system_fingerprint": run.generation.system_fingerprint,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        usages = [run.usage for run in self._runs]
        prompt = sum(usage.prompt_tokens for usage in usages)
        completion = sum(usage.completion_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_prompt_tokens for usage in usages)},
            "completion_tokens_details": {"reasoning_tokens": sum(run.num_reasoning_tokens for run in self._runs)},
        }

    def _ids_of(self, run: Run[Any]) -> Headers:
        load = load_headers(run.load_format, run.generation)
        return {"x-request-id": self._request_id, "x-engine-id": run.generation.engine_id, **load}

    async def _send_error(self, error: StepwireError, send: Send) -> None:
        headers = {**headers_of(error), "x-request-id": self._request_id}
        await send_whole(status_of(error), to_json(to_body(error, self._names)), headers, send)


async def _run_all(runs: Sequence[Run[Any]], write: Any) -> StepwireError | None:
    """Run them side by side; the first that fails ends all. Returns its error."""
    failed: list[StepwireError] = []
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(run.run(write))
    except* StepwireError as errors:
        failed.extend(error for error in errors.exceptions if isinstance(error, StepwireError))
    return failed[0] if failed else None


def _num_entries(choice: Choice) -> int:
    """Roughly: tokens, each with as many others as the first."""
    logprobs = choice["logprobs"] or {}
    content = logprobs.get("content")
    if content is not None:
        return len(content) * (1 + len(content[0]["top_logprobs"])) if content else 0
    top = logprobs.get("top_logprobs") or ()
    return sum(1 + len(others or ()) for others in top)
