"""What `stepwire chat` shows: content and calls on standard output, reasoning and the summary beside it."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable

from stepwire.v1 import chat_service_pb2 as pb
from stepwire_client import cli_printing
from stepwire_client.call_facts import CallFacts


def print_chat(events: Iterable[pb.ChatStreamResponse], facts: CallFacts, *, json: bool) -> pb.Message:
    """Show an answer as it comes; returns it as the turn it becomes in the conversation."""
    content = ""
    calls: dict[int, pb.ToolCall] = {}
    is_reasoning = False
    for event in events:
        delta = event.delta
        content += delta.content
        for part in delta.tool_calls:
            _append(calls, part)
        if json:
            cli_printing.write_json(event)
            continue
        if delta.reasoning:
            cli_printing.aside(delta.reasoning)
        elif is_reasoning and delta.content:
            cli_printing.aside("\n")
        is_reasoning = bool(delta.reasoning) or (is_reasoning and not delta.content)
        cli_printing.write_text(delta.content)
        if event.WhichOneof("event") == "finished":
            _print_end(content, calls)
            cli_printing.print_summary(event.finished, facts)
    return pb.Message(
        role=pb.ROLE_ASSISTANT,
        content=[pb.ContentPart(text=content)] if content else [],
        tool_calls=[calls[index] for index in sorted(calls)],
    )


def _append(calls: dict[int, pb.ToolCall], part: pb.ToolCall) -> None:
    call = calls.setdefault(part.index, pb.ToolCall(index=part.index))
    call.id += part.id
    call.name += part.name
    call.arguments += part.arguments


def _print_end(content: str, calls: dict[int, pb.ToolCall]) -> None:
    if content or not calls:
        cli_printing.write_text("\n")
    for index in sorted(calls):
        name = json_text.dumps(calls[index].name)
        # The arguments are JSON text already, or the beginning of one that was cut off.
        cli_printing.write_text(f'{{"name": {name}, "arguments": {calls[index].arguments or "{}"}}}\n')
