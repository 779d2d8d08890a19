"""Reads the calls that `tool_grammar` makes sure of: an array of {"name", "parameters"}, or the arguments alone. Pure.

The grammar fixes the order of the keys: a call's name is known before its arguments, which are passed on as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from frontend.output_parsers.interface import ContentDelta, OutputDelta, ToolCallDelta

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\{)')


class EnforcedCalls:
    """An OutputParser. `function_name`: whose arguments the text is; None = an array of calls."""

    def __init__(self, function_name: str | None, new_call_id: Callable[[], str]) -> None:
        self.tool_calls = 0
        # A grammar has no place for it.
        self.num_reasoning_chars = 0
        self._function_name = function_name
        self._new_call_id = new_call_id
        # What stands before the arguments of the next call, as far as it has come.
        self._head = ""
        self._arguments = _JsonObject()
        self._is_inside = False

    def feed(self, text: str) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        while text:
            text = self._take_arguments(text, deltas) if self._is_inside else self._take_head(text, deltas)
        return deltas

    def finish(self) -> list[OutputDelta]:
        """A text that ended before its first call is shown; what follows a call is punctuation."""
        return [ContentDelta(self._head)] if self._head and not self.tool_calls else []

    def _take_head(self, text: str, deltas: list[OutputDelta]) -> str:
        self._head += text
        if self._function_name is not None:
            _, brace, after = self._head.partition("{")
            name, rest = self._function_name, brace + after
        else:
            match = _HEAD.search(self._head)
            name, rest = (json.loads(match[1]), self._head[match.end() :]) if match else ("", "")
        # A named function has one call; white space may follow it.
        if not rest or (self._function_name is not None and self.tool_calls):
            return ""
        deltas.append(ToolCallDelta(self.tool_calls, self._new_call_id(), name, ""))
        self.tool_calls += 1
        self._head, self._arguments, self._is_inside = "", _JsonObject(), True
        return rest

    def _take_arguments(self, text: str, deltas: list[OutputDelta]) -> str:
        end = self._arguments.end_in(text)
        self._is_inside = end is None
        deltas.append(ToolCallDelta(self.tool_calls - 1, "", "", text[:end]))
        return "" if end is None else text[end:]


class _JsonObject:
    """Finds the end of an object in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """Where the object has ended in this piece; None = not yet."""
        for index, character in enumerate(text):
            if self._is_string:
                self._is_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._is_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if self._depth == 0:
                    return index + 1
        return None
