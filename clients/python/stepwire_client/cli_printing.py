"""What the CLI shows: answers on standard output, everything about them on standard error.

So `stepwire generate ... > answer.txt` holds the answer and nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from rich.console import Console

from stepwire.v1 import chat_service_pb2, common_pb2, generation_service_pb2
from stepwire_client import cli_logprobs
from stepwire_client.call_facts import CallFacts
from stepwire_client.errors import CallError

Response = generation_service_pb2.GenerateStreamResponse
Finished = generation_service_pb2.GenerateStreamResponse.Finished | chat_service_pb2.ChatStreamResponse.Finished

_HINTS = {
    "QUEUE_FULL": "the server is full",
    "DRAINING": "the server is shutting down",
    "ENGINE_STARTING": "the engine is still starting",
    "ENGINE_NOT_FOUND": "the admin port has no such engine",
    "ENGINE_DEAD": "the engine died; it may be back in a moment",
}
# A model may emit escape sequences, and a terminal would obey them.
_CONTROL = dict.fromkeys(code for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t")


def write_text(text: str) -> None:
    """Part of an answer, at once."""
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_json(message: Message) -> None:
    """One message as one line, with the field names of the proto files."""
    sys.stdout.write(to_json(message) + "\n")
    sys.stdout.flush()


def to_json(message: Message) -> str:
    """Compact proto JSON that keeps non-ASCII text readable."""
    fields = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return json.dumps(fields, ensure_ascii=False)


def note(text: str, style: str = "dim") -> None:
    """A line about the answer."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(text, style=style, markup=False)


def aside(text: str) -> None:
    """Part of what is told beside the answer while it comes."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(text, style="dim", markup=False, end="")


def print_stream(events: Iterable[Response], num_choices: int, facts: CallFacts) -> None:
    """Stream one choice as it comes; of several, each when it is complete, because they arrive interleaved.

    `facts` are of the call that brings the events.
    """
    texts: dict[int, list[str]] = {}
    logprobs: dict[int, list[common_pb2.TokenLogprobs]] = {}
    for event in events:
        kind = event.WhichOneof("event")
        if kind == "prompt":
            cli_logprobs.print_logprobs("prompt", event.prompt.prompt_logprobs)
        elif kind == "delta":
            logprobs.setdefault(event.delta.choice, []).extend(event.delta.logprobs)
        if kind == "delta" and num_choices == 1:
            write_text(event.delta.text)
        elif kind == "delta":
            texts.setdefault(event.delta.choice, []).append(event.delta.text)
        elif kind == "finished":
            if num_choices > 1:
                write_text(f"[{event.finished.choice}] {''.join(texts.pop(event.finished.choice, []))}")
            write_text("\n")
            cli_logprobs.print_logprobs("answer", logprobs.pop(event.finished.choice, []))
            print_summary(event.finished, facts)


def print_summary(finished: Finished, facts: CallFacts) -> None:
    """How a choice ended, on standard error."""
    parts = [common_pb2.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()]
    if finished.stop_match.WhichOneof("match"):
        parts[0] += f" at {finished.stop_match.WhichOneof('match')}"
    if finished.HasField("usage"):
        usage = finished.usage
        parts.append(f"{usage.prompt_tokens} prompt tokens ({usage.cached_prompt_tokens} cached)")
        parts.append(f"{usage.completion_tokens} completion tokens")
    if finished.HasField("timings"):
        timings = finished.timings
        parts.append(f"first token after {timings.ttft_ns / 1e6:.0f} ms")
        parts.append(
            f"queued {timings.queued_ns / 1e6:.0f}, prefill {timings.prefill_ns / 1e6:.0f}, "
            f"decode {timings.decode_ns / 1e6:.0f} ms"
        )
    if facts.num_resumes:
        parts.append(
            f"broke off {facts.num_resumes} times and went on" if facts.num_resumes > 1 else "broke off and went on"
        )
    note(" · ".join(parts))


def describe(error: CallError, target: str, timeout_s: float | None = None) -> str:
    """A failed call in words a user can act on."""
    if error.details.violations:
        lines = [f"  {item.field}: {item.description}" for item in error.details.violations]
        return "\n".join(["the server refused the request:", *lines])
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
        return f"cannot reach a stepwire server at {target}; `make run` starts one ({error.message})"
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None and error.reason in {"", "DEADLINE"}:
        return f"no complete answer within {timeout_s:g} s (--timeout)"
    hint = _HINTS.get(error.reason, error.reason.lower().replace("_", " ") or error.code.name.lower())
    retry = f"; try again in {error.details.retry_after_s:g} s" if error.details.retry_after_s else ""
    return f"{hint}: {error.message}{retry}"


def print_error(error: CallError, target: str, timeout_s: float | None = None) -> None:
    """The failure on standard error."""
    note(f"error: {describe(error, target, timeout_s)}", style="bold red")
