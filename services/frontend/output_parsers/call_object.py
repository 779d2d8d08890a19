"""Calls written as JSON: {"name": ..., "arguments": {...}}, read while they are being written."""

from __future__ import annotations

import json
from collections.abc import Callable

from frontend.output_parsers.text_reader import NotACallError, Reading, TextReader

_CLOSING = {"{": "}", "[": "]"}
_ARGUMENTS = ("arguments", "parameters")
# What models write beside the two that count.
_OTHERS = ("type", "id", "description")


class CallObjectReader(TextReader):
    """Adds to the reader what it takes to read JSON."""

    def accepts(self, name: str) -> bool:
        """Whether an object of that name is a call."""
        return bool(name)

    def call(self, opening: str) -> Reading[bool]:
        """A call whose first character was `opening`; False when it is none, or goes on as no call does."""
        try:
            yield from self._call_object(opening)
        except NotACallError:
            self.give_up()
            return False
        self.end_call()
        return True

    def arguments(self, opening: str) -> Reading[None]:
        """One JSON object, handed out as the arguments of the call that has begun."""
        if opening != "{":
            raise NotACallError
        yield from self.container(opening, self.add_arguments)

    def container(self, opening: str, keep: Callable[[str], None]) -> Reading[None]:
        """An object or an array, to its last character."""
        keep(opening)
        awaited = [_CLOSING[opening]]
        while awaited:
            character = yield from self.next()
            keep(character)
            if character == '"':
                yield from self._rest_of_string(keep)
            elif character in _CLOSING:
                awaited.append(_CLOSING[character])
            elif character in "}]" and character != awaited.pop():
                raise NotACallError

    def _call_object(self, opening: str) -> Reading[None]:
        if opening != "{":
            raise NotACallError
        name, arguments, character = "", "{}", ","
        while character == ",":
            character = yield from self.after_space()
            if character == "}":
                break
            key = yield from self._string(character)
            if (yield from self.after_space()) != ":":
                raise NotACallError
            character = yield from self.after_space()
            if self._is_in_call and key in _ARGUMENTS:
                raise NotACallError
            if key in _ARGUMENTS and character == "{" and self.accepts(name):
                self.begin_call(name)
                yield from self.arguments(character)
                character = yield from self.after_space()
                continue
            value, character = yield from self._value(character)
            if key == "name":
                name = _text_of(value)
            elif key in _ARGUMENTS:
                arguments = _arguments_of(value)
            elif key not in _OTHERS:
                raise NotACallError
        if character != "}" or not self.accepts(name):
            raise NotACallError
        if not self._is_in_call:
            self.begin_call(name)
            self.add_arguments(arguments)

    def _value(self, opening: str) -> Reading[tuple[str, str]]:
        """Any value as it is written, and the first character behind it that is no white space."""
        pieces: list[str] = []
        if opening in _CLOSING:
            yield from self.container(opening, pieces.append)
        elif opening == '"':
            pieces.append(opening)
            yield from self._rest_of_string(pieces.append)
        else:
            character = opening
            while character.isalnum() or character in "+-.":
                pieces.append(character)
                character = yield from self.next()
            if not pieces:
                raise NotACallError
            if not character.isspace():
                return "".join(pieces), character
        return "".join(pieces), (yield from self.after_space())

    def _string(self, opening: str) -> Reading[str]:
        if opening != '"':
            raise NotACallError
        pieces = [opening]
        yield from self._rest_of_string(pieces.append)
        return _text_of("".join(pieces))

    def _rest_of_string(self, keep: Callable[[str], None]) -> Reading[None]:
        is_escaped = False
        while True:
            character = yield from self.next()
            keep(character)
            if is_escaped:
                is_escaped = False
            elif character == "\\":
                is_escaped = True
            elif character == '"':
                return


def _text_of(value: str) -> str:
    """What a JSON string stands for: characters, of which an escape can write half of one, too."""
    try:
        text = json.loads(value)
        if not isinstance(text, str):
            raise NotACallError
        text.encode()
    # Of which UnicodeEncodeError is one.
    except ValueError:
        raise NotACallError from None
    return text


def _arguments_of(value: str) -> str:
    """JSON text in a string is what some models write; null is what they write for no arguments."""
    if value in ("null", '""'):
        return "{}"
    text = _text_of(value) if value.startswith('"') else value
    if not text.lstrip().startswith("{"):
        raise NotACallError
    return text
