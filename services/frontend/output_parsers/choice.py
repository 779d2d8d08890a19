"""Which parser reads a model's text: by name, or by the model's family."""

from __future__ import annotations

from frontend.output_parsers.call_object import CallObjectReader
from frontend.output_parsers.interface import OutputParser, ParserOptions
from frontend.output_parsers.reasoning import ReasoningParser
from frontend.output_parsers.tool_parsers import HermesParser, Llama3JsonParser, MistralParser, Qwen3CoderParser

_TOOL_PARSERS: dict[str, type[CallObjectReader]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
}
# Whether an answer of the family begins with its reasoning even where nothing says so.
_REASONING_PARSERS = {"deepseek_r1": True, "qwen3": False}
TOOL_PARSERS = tuple(_TOOL_PARSERS)
REASONING_PARSERS = tuple(_REASONING_PARSERS)


def output_parser(options: ParserOptions) -> OutputParser:
    """The parser of one choice; names must be known, and at least one given."""
    tools = None if options.tool_parser is None else _TOOL_PARSERS[options.tool_parser](options)
    if options.reasoning_parser is None:
        if tools is None:
            raise ValueError("a parser of nothing")
        return tools
    return reasoning_parser(options.reasoning_parser, tools, is_open=options.reasoning_open)


def reasoning_parser(name: str, inner: OutputParser | None, *, is_open: bool) -> ReasoningParser:
    """By its name. is_open: the prompt has opened the reasoning already."""
    return ReasoningParser(inner, is_open=is_open or _REASONING_PARSERS[name])


def families(model_type: str, chat_template: str) -> tuple[str | None, str | None]:
    """Names of the tool parser and the reasoning parser: by the marks in the model's own template, then by its type."""
    return _tool_family(model_type, chat_template), _reasoning_family(model_type, chat_template)


def keeps_special_tokens(tool_parser: str) -> bool:
    """Whether the marks of the calls are special tokens, which must then stay in the text."""
    return _TOOL_PARSERS[tool_parser].keeps_special_tokens


def _tool_family(model_type: str, template: str) -> str | None:
    if "<function=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    is_llama3 = model_type == "llama" and "<|start_header_id|>" in template and "tools" in template
    return "llama3_json" if is_llama3 else None


def _reasoning_family(model_type: str, template: str) -> str | None:
    if "</think>" not in template:
        return None
    # Its own and distilled models alike: the template ends with an open mark or the model writes none.
    return "deepseek_r1" if model_type.startswith("deepseek") or "<｜Assistant｜>" in template else "qwen3"
