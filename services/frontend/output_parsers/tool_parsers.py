"""How each family of models writes its calls.

What is between calls is content, but for white space before a mark. Marks that end a turn or a call are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from frontend.output_parsers.call_object import CallObjectReader
from frontend.output_parsers.interface import ParserOptions
from frontend.output_parsers.text_reader import NotACallError, Reading


class HermesParser(CallObjectReader):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3."""

    keeps_special_tokens = True
    _BEGIN, _END, _TURN_END = "<tool_call>", "</tool_call>", "<|im_end|>"

    def read(self) -> Reading[None]:
        is_behind_call = False
        while True:
            marks = (self._BEGIN, self._TURN_END, *((self._END,) if is_behind_call else ()))
            mark = yield from self.content_until(marks)
            before = self.tool_calls
            if mark == self._BEGIN:
                yield from self.call((yield from self.after_space()))
            else:
                self.drop()
            is_behind_call = self.tool_calls > before


class Llama3JsonParser(CallObjectReader):
    """{"name": ..., "parameters": {...}}, alone or several with semicolons between them, with or without a tag."""

    keeps_special_tokens = True
    _TAG, _ENDS = "<|python_tag|>", ("<|eom_id|>", "<|eot_id|>")

    def __init__(self, options: ParserOptions) -> None:
        self._names = {tool.name for tool in options.tools}
        super().__init__(options)

    def accepts(self, name: str) -> bool:
        """An object alone may be an answer in JSON: it is a call if there is such a function."""
        return name in self._names

    def read(self) -> Reading[None]:
        # Without a tag only what an answer begins with, and what follows a call, is one.
        may_begin = True
        while True:
            separators = (";", ",") if self.tool_calls else ()
            mark = (yield from self.mark_at_once(("{", *separators, self._TAG, *self._ENDS))) if may_begin else ""
            if not mark:
                mark = yield from self.content_until((self._TAG, *self._ENDS))
            if mark in separators:
                mark = yield from self.after_space()
            if mark == self._TAG or mark in self._ENDS:
                self.drop()
                may_begin = may_begin or mark == self._TAG
            else:
                may_begin = yield from self.call(mark)


class MistralParser(CallObjectReader):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name{...} or name[ARGS]{...} each."""

    keeps_special_tokens = True
    _BEGIN, _ARGUMENTS, _CALL_ID, _TURN_END = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>"

    def read(self) -> Reading[None]:
        while True:
            mark = yield from self.content_until((self._BEGIN, self._TURN_END))
            if mark == self._TURN_END:
                self.drop()
                continue
            character = yield from self.after_space()
            if character == "[":
                yield from self._array()
            else:
                yield from self._named(character)

    def _array(self) -> Reading[None]:
        character = yield from self.after_space()
        while character == "{":
            if not (yield from self.call(character)):
                return
            character = yield from self.after_space()
            if character == ",":
                character = yield from self.after_space()
        if character != "]":
            self.give_up()
        self.drop()

    def _named(self, first: str) -> Reading[None]:
        text = first
        try:
            while not text.endswith("{"):
                character = yield from self.next()
                if character.isspace():
                    raise NotACallError
                text += character
            name = text.removesuffix("{").removesuffix(self._ARGUMENTS).partition(self._CALL_ID)[0]
            if not name:
                raise NotACallError
            self.begin_call(name)
            yield from self.arguments("{")
        except NotACallError:
            self.give_up()
        else:
            self.end_call()


class Qwen3CoderParser(CallObjectReader):
    """<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>, values as plain text."""

    keeps_special_tokens = True
    _BEGIN, _END, _TURN_END = "<tool_call>", "</tool_call>", "<|im_end|>"
    _FUNCTION, _FUNCTION_END = "<function=", "</function>"
    _PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"

    def __init__(self, options: ParserOptions) -> None:
        self._schemas = {tool.name: tool.parameters for tool in options.tools}
        super().__init__(options)

    def read(self) -> Reading[None]:
        is_behind_call = False
        while True:
            marks = (self._BEGIN, self._FUNCTION, self._TURN_END, *((self._END,) if is_behind_call else ()))
            mark = yield from self.content_until(marks)
            if mark == self._FUNCTION or (mark == self._BEGIN and (yield from self._follows(self._FUNCTION))):
                is_behind_call = yield from self._function()
            else:
                is_behind_call = False
                if mark != self._BEGIN:
                    self.drop()

    def _function(self) -> Reading[bool]:
        try:
            name = yield from self._until(">")
            if not name.strip():
                raise NotACallError
            self.begin_call(name.strip())
            yield from self._parameters(self._schemas.get(name.strip(), {}))
        except NotACallError:
            self.give_up()
            return False
        self.end_call()
        return True

    def _parameters(self, schema: Mapping[str, Any]) -> Reading[None]:
        # Whatever the caller wrote there.
        given, opening = schema.get("properties"), "{"
        properties: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        while (yield from self._mark_of((self._PARAMETER, self._FUNCTION_END))) == self._PARAMETER:
            key = (yield from self._until(">")).strip()
            schema_of_value = properties.get(key, {})
            self.add_arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            if isinstance(schema_of_value, Mapping) and schema_of_value.get("type") == "string":
                yield from self._string_value()
            else:
                text = yield from self._until(self._PARAMETER_END)
                self.add_arguments(_typed(text.strip("\n"), schema_of_value))
            opening = ", "
        self.add_arguments("}" if opening == ", " else "{}")

    def _string_value(self) -> Reading[None]:
        """Handed out while it is being written; one line break belongs to the mark before it and one to that behind."""
        self.add_arguments('"')
        end = "\n" + self._PARAMETER_END
        pending = yield from self.next()
        pending = pending.removeprefix("\n")
        while pending not in (end, self._PARAMETER_END):
            while pending and not (end.startswith(pending) or self._PARAMETER_END.startswith(pending)):
                self.add_arguments(json.dumps(pending[0], ensure_ascii=False)[1:-1])
                pending = pending[1:]
            if pending not in (end, self._PARAMETER_END):
                pending += yield from self.next()
        self.add_arguments('"')

    def _follows(self, mark: str) -> Reading[bool]:
        """Whether it comes next; if not, what is held is content."""
        try:
            yield from self._mark_of((mark,))
        except NotACallError:
            self.give_up()
            return False
        return True

    def _mark_of(self, marks: tuple[str, ...]) -> Reading[str]:
        """The one that comes next, behind white space."""
        found = yield from self.after_space()
        while found not in marks:
            if not any(mark.startswith(found) for mark in marks):
                raise NotACallError
            found += yield from self.next()
        return found

    def _until(self, mark: str) -> Reading[str]:
        """The text before it."""
        text = ""
        while not text.endswith(mark):
            text += yield from self.next()
        return text.removesuffix(mark)


def _typed(text: str, schema: Any) -> str:
    """The JSON of a value that was written as plain text, as the schema and the text allow; else it is a string."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        lowered = text.strip().lower()
        is_boolean = kinds == "boolean" and lowered in ("true", "false")
        return lowered if is_boolean else json.dumps(text, ensure_ascii=False)
    return text.strip()


def _no_constant(name: str) -> None:
    """NaN and the infinities are no JSON."""
    raise ValueError(name)
