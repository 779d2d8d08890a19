"""A conversation as the prompt text its model was trained on, through the model's own Jinja template.

What a template may use is transformers' convention, which all templates are written for.

Templates come with models and are not trusted: they run in a sandbox that can neither change what it is given nor reach
beyond it. Pure once loaded, thread-safe. A sandbox does not bound time: not for the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frontend.generation_config import read_json
from stepwire.errors import InvalidRequestError

Message = Mapping[str, object]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT_NAME = "default"


# What the server sets, and nobody else.
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")


class _RefusedError(jinja2.TemplateError):
    """The template has called raise_exception."""


class ChatTemplate:
    """`source` is the template's text, None for a model without one; special tokens are variables of it.

    With `is_callers` it came with a request: it may quote itself and the messages, so errors do not quote it.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], *, is_callers: bool = False) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._is_callers = is_callers

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate:
        """The template of a model directory. Raises ValueError for files that are not valid JSON."""
        return cls(_read_source(directory), _read_special_tokens(directory))

    def with_source(self, source: str, *, is_callers: bool = False) -> ChatTemplate:
        """Another template for the same model."""
        return ChatTemplate(source, self._special_tokens, is_callers=is_callers)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt, special tokens included: it must be encoded without adding more.

        `variables` are further ones that the template may know, OWN_VARIABLES not among them.
        Raises InvalidRequestError when there is no template, or it refuses the messages or can not cope with them.
        """
        _check_messages(messages)
        template = self._template
        try:
            text = template.render(
                {
                    # Templates ask whether they are none, which an undefined variable is not.
                    "documents": None,
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        # Whatever it is, these messages and this template bring it about.
        except Exception as error:
            what = self._describe(error)
            raise InvalidRequestError.of_field("messages", f"the chat template fails: {what}") from error
        _check_text(text)
        return text

    @cached_property
    def _template(self) -> jinja2.Template:
        # Compiled by the first use: a model whose template is broken still generates.
        if self.source is None:
            raise InvalidRequestError.of_field("chat_template", "the model has no chat template; give one")
        try:
            return _environment().from_string(self.source)
        # Nested too deeply, or a constant that cannot be computed: whatever it is, the template brings it about.
        except Exception as error:
            place = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            is_quoted = isinstance(error, jinja2.TemplateError) and not self._is_callers
            what = str(error) if is_quoted else f"{type(error).__name__}{place}"
            raise InvalidRequestError.of_field("chat_template", f"the template is not valid: {what}") from error

    def _describe(self, error: Exception) -> str:
        """What went wrong, without text of the conversation, which the text of an error may quote."""
        if self._is_callers:
            return type(error).__name__
        if isinstance(error, _RefusedError):
            # A constant of the template, or something built from the messages.
            text = error.message or ""
            return text if text in (self.source or "") else "it refuses the conversation"
        return str(error) if isinstance(error, jinja2.TemplateError | TypeError) else type(error).__name__


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; in a prompt it has no meaning."""

    tags = {"generation"}  # noqa: RUF012  # so declared by the library

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Macro) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models have never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidRequestError.of_field("messages", "the conversation is empty")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError.of_field(f"messages[{index}]", "a message is a mapping with a role and content")


def _check_text(text: str) -> None:
    """Half a character, as JSON and templates can write one, has no bytes that a tokenizer could take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # Not chained: its text quotes.
        raise InvalidRequestError.of_field("messages", "the prompt would have a lone surrogate in it") from None


def _read_source(directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get(_DEFAULT_NAME)
    return found if isinstance(found, str) else None


def _read_special_tokens(directory: Path) -> dict[str, str]:
    config: dict[str, Any] = read_json(directory / "special_tokens_map.json")
    config |= {name: value for name, value in read_json(directory / "tokenizer_config.json").items() if value}
    texts = {name: _text_of(config.get(name)) for name in _SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _text_of(token: object) -> str | None:
    # Older tokenizers write a token as an object with its text in `content`.
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
