"""Runs a text scenario: commands in, the same commands with what the caller sees under each.

prompt "hi"           the prompt, one token a byte; also b"\\xf0" for bytes that are no text
set stop_strings=["X"] min_tokens=2 include_stop=True skip_special_tokens=False ...
out "abc"             one engine output with one token a byte
each "abc"            one engine output for each byte
words " hello world"  one engine output for each token of the text
end length | end eos | end stop 70   the engine's end; the last two come with the stop token
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator
from dataclasses import fields

from fakes.small_tokenizer import byte_ids, byte_level_tokenizer
from fakes.text_requests import finish, make_request, tokens
from frontend.choice_state import ChoiceNews, ChoiceState
from frontend.engine_outputs import EngineFinishReason, EngineOutput
from frontend.generation_events import StopMatch
from frontend.input_processor import OutputSettings

TOKENIZER = byte_level_tokenizer()
_OUTPUT_FIELDS = {field.name for field in fields(OutputSettings)}


def run_scenario(text: str) -> str:
    """The scenario with fresh results; indented lines of the input are old results and are dropped."""
    lines: list[str] = []
    request: dict[str, object] = {}
    choice: ChoiceState | None = None
    has_ended = False
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        command, _, argument = line.partition(" ")
        if command in ("prompt", "set"):
            request.update(_settings(command, argument))
        elif line and not line.startswith("#"):
            choice = choice or _make_choice(request)
            for output in _outputs(command, argument):
                if has_ended:
                    lines.append("  -> late, skipped")
                    continue
                news = choice.process(output)
                has_ended = news.reason is not None
                lines.extend(_describe(news, choice))
    return "\n".join(lines) + "\n"


def _settings(command: str, argument: str) -> dict[str, object]:
    if command == "prompt":
        return {"prompt_token_ids": _ids(argument)}
    pairs = (item.split("=", 1) for item in shlex.split(argument, posix=False))
    return {name: ast.literal_eval(value) for name, value in pairs}


def _make_choice(request: dict[str, object]) -> ChoiceState:
    output = {name: value for name, value in request.items() if name in _OUTPUT_FIELDS}
    rest = {name: value for name, value in request.items() if name not in _OUTPUT_FIELDS}
    return ChoiceState(make_request(output=output, **rest), 0, TOKENIZER)


def _ids(argument: str) -> list[int]:
    value = ast.literal_eval(argument)
    return byte_ids(value if isinstance(value, bytes) else value.encode())


def _outputs(command: str, argument: str) -> Iterator[EngineOutput]:
    if command == "out":
        yield tokens(1, *_ids(argument))
    elif command == "each":
        yield from (tokens(1, token_id) for token_id in _ids(argument))
    elif command == "words":
        yield from (tokens(1, token_id) for token_id in TOKENIZER.encode(ast.literal_eval(argument)))
    elif command == "end":
        yield _end(*argument.split())
    else:
        raise ValueError(f"unknown command {command!r}")


def _end(kind: str, token_id: str = "0") -> EngineOutput:
    if kind == "length":
        return finish(1, EngineFinishReason.LENGTH)
    stop_token_id = int(token_id) if kind == "stop" else None
    return finish(1, EngineFinishReason.STOP, int(token_id), stop_token_id=stop_token_id)


def _describe(news: ChoiceNews, choice: ChoiceState) -> Iterator[str]:
    yield f"  -> {news.text!r} ids {len(news.token_ids)}"
    if news.reason is not None:
        why = f" by {_match(news.stop_match)}" if news.stop_match else ""
        yield f"  -> {news.reason.name}{why}, {choice.num_output_tokens} output tokens"


def _match(match: StopMatch) -> str:
    if match.stop_string is not None:
        return f"stop string {match.stop_string!r}"
    return f"eos {match.eos_token_id}" if match.eos_token_id is not None else f"stop token {match.stop_token_id}"
