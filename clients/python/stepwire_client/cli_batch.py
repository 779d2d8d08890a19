"""`stepwire generate --file`: many prompts, a bounded number in flight, results as JSON lines in input order.

Owner: the main thread reads and writes; pool threads only wait for their one unary call each.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import typer
from google.protobuf import json_format
from google.protobuf.message import Message
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stepwire.v1 import generation_service_pb2
from stepwire_client import cli_input, cli_printing
from stepwire_client.client import Client
from stepwire_client.errors import CallError

GenerateRequest = generation_service_pb2.GenerateRequest
GenerateResponse = generation_service_pb2.GenerateResponse


def read_requests(path: Path, template: GenerateRequest) -> list[GenerateRequest]:
    """One request a line. A .jsonl line is a GenerateRequest or a string; its fields win over the options."""
    is_jsonl = path.suffix == ".jsonl"
    # Not splitlines(): a JSON string, and a prompt too, may hold U+2028 and its like.
    lines = cli_input.read_file(path).split("\n")
    return [
        _parse_line(line, f"{path}:{number}", template) if is_jsonl else _with_text(line, template)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def run(
    client: Client, requests: list[GenerateRequest], output: TextIO, concurrency: int, timeout_s: float | None
) -> int:
    """Answer all; returns how many failed. A failed request becomes a line with `error` and stops no other."""
    num_failed = 0
    with _progress(len(requests)) as advance, ThreadPoolExecutor(concurrency) as pool:
        try:
            for number, future in enumerate(_in_order(pool, client, requests, concurrency, timeout_s)):
                num_failed += _write_line(output, number, future, client.target, timeout_s)
                advance()
        except BaseException:
            # Ctrl-C: closing the channel cancels every call, so that leaving the pool does not wait for answers.
            client.close()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return num_failed


def _in_order(
    pool: ThreadPoolExecutor, client: Client, requests: list[GenerateRequest], concurrency: int, timeout_s: float | None
) -> Iterator[Future[GenerateResponse]]:
    # Work is handed out only as results are taken: a failure to write must not leave thousands of calls queued.
    pending: deque[Future[GenerateResponse]] = deque()
    for request in requests:
        if len(pending) >= 2 * concurrency:
            yield pending.popleft()
        pending.append(pool.submit(client.generate, request, timeout_s=timeout_s))
    while pending:
        yield pending.popleft()


def _write_line(
    output: TextIO, number: int, future: Future[GenerateResponse], target: str, timeout_s: float | None
) -> bool:
    """True when the request failed."""
    try:
        result = json.loads(cli_printing.to_json(future.result()))
    except CallError as error:
        message = cli_printing.describe(error, target, timeout_s)
        result = {"error": {"code": error.code.name, "reason": error.reason, "message": message}}
    output.write(json.dumps({"index": number, **result}, ensure_ascii=False) + "\n")
    output.flush()
    return "error" in result


def _with_text(text: str, template: GenerateRequest) -> GenerateRequest:
    request = GenerateRequest()
    request.CopyFrom(template)
    request.text = text
    return request


def _parse_line(line: str, where: str, template: GenerateRequest) -> GenerateRequest:
    try:
        value = json.loads(line)
        if isinstance(value, str):
            return _with_text(value, template)
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__}")
        own = json_format.ParseDict(value, GenerateRequest())
    except (ValueError, json_format.ParseError) as error:
        raise typer.BadParameter(f"{where}: neither a JSON string nor a GenerateRequest object: {error}") from error
    if own.WhichOneof("prompt") is None:
        raise typer.BadParameter(f"{where}: the object has neither `text` nor `token_ids`")
    request = GenerateRequest()
    request.CopyFrom(template)
    _clear_given(request, value)
    request.MergeFrom(own)
    return request


def _clear_given(message: Message, given: Mapping[str, Any]) -> None:
    """Forget what the options put into the fields of `given`: a merge appends lists and does not bring a false."""
    # JSON takes a field by either of its names.
    fields = {name: field for field in message.DESCRIPTOR.fields for name in (field.name, field.json_name)}
    for name, value in given.items():
        field = fields[name]
        if isinstance(value, dict) and not field.is_repeated:
            _clear_given(getattr(message, field.name), value)
        else:
            message.ClearField(field.name)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("generating", total=total)
        yield lambda: progress.advance(task)
