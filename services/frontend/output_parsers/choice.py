"""Which parser reads a model's text: by name, or by the model's family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from frontend.output_parsers.interface import ContentDelta, OutputDelta, OutputParser

TOOL_PARSERS = ("hermes", "llama3_json", "mistral", "qwen3_coder")
REASONING_PARSERS = ("deepseek_r1", "qwen3")
JSON_ARRAY = "json_array"


@dataclass(frozen=True, slots=True)
class ToolSchema:
    name: str


@dataclass(frozen=True, slots=True)
class ParserOptions:
    tool_parser: str | None
    reasoning_parser: str | None
    reasoning_open: bool
    tool_call_id: Callable[[], str]
    tools: tuple[ToolSchema, ...] = ()


class _PlainText:
    tool_calls = 0

    def feed(self, text: str) -> list[OutputDelta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[OutputDelta]:
        return []


def output_parser(options: ParserOptions) -> OutputParser:
    return _PlainText()


def families(model_type: str, chat_template: str) -> tuple[str | None, str | None]:
    return ("hermes" if "<tool_call>" in chat_template else None), ("qwen3" if "<think>" in chat_template else None)


def keeps_special_tokens(tool_parser: str) -> bool:
    return tool_parser == "mistral"
