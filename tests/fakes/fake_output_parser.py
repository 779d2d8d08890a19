"""A parser of made-up marks, one character each: ~reasoning~, @name:arguments; and anything else is content.

A mark is known at once, so nothing is ever held back but the name of a call.
"""

from __future__ import annotations

from frontend.output_parsers.interface import ContentDelta, OutputDelta, ReasoningDelta, ToolCallDelta


class FakeOutputParser:
    def __init__(self, *, is_reasoning: bool = False) -> None:
        self.tool_calls = 0
        self.num_reasoning_chars = 0
        self._is_reasoning = is_reasoning
        self._is_call = False
        self._name: str | None = None

    def feed(self, text: str) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        for character in text:
            was_reasoning = self._is_reasoning
            deltas += self._take(character)
            self.num_reasoning_chars += was_reasoning or self._is_reasoning
        return deltas

    def finish(self) -> list[OutputDelta]:
        return [] if self._name is None else [ContentDelta("@" + self._name)]

    def _take(self, character: str) -> list[OutputDelta]:
        index = self.tool_calls - 1
        if self._name is not None and character == ":":
            name, self._name, self._is_call = self._name, None, True
            self.tool_calls += 1
            return [ToolCallDelta(index + 1, f"id{index + 1}", name, "")]
        if self._name is not None:
            self._name += character
            return []
        if self._is_call and character == ";":
            self._is_call = False
            return []
        if self._is_call:
            return [ToolCallDelta(index, "", "", character)]
        if character == "~":
            self._is_reasoning = not self._is_reasoning
            return []
        if character == "@":
            self._name = ""
            return []
        return [ReasoningDelta(character) if self._is_reasoning else ContentDelta(character)]
