"""Parts of choices, as a stream shows them, put together to the whole choices of an answer at once. Pure."""

from __future__ import annotations

from typing import Any

from frontend.api.openai_http.run import Choice


class WholeChoices:
    """Takes parts in order; text and logprobs are appended, what else there is is said once."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}
        self._pieces: dict[tuple[int, str], list[str]] = {}
        self._calls: dict[int, dict[int, dict[str, Any]]] = {}

    def add(self, parts: list[Choice]) -> None:
        for part in parts:
            index = part["index"]
            choice = self._choices.setdefault(index, {"index": index, "logprobs": None})
            self._append_logprobs(choice, part["logprobs"])
            for name in ("finish_reason", "stop_reason"):
                choice[name] = part[name]
            if "delta" in part:
                self._add_delta(index, part["delta"])
            else:
                self._pieces.setdefault((index, "text"), []).append(part["text"])

    def completions(self) -> list[Choice]:
        """In the order of their index."""
        return [{**choice, "text": self._text(index, "text")} for index, choice in sorted(self._choices.items())]

    def chats(self) -> list[Choice]:
        """In the order of their index."""
        return [{**choice, "message": self._message(index)} for index, choice in sorted(self._choices.items())]

    def _add_delta(self, index: int, delta: dict[str, Any]) -> None:
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                self._pieces.setdefault((index, name), []).append(delta[name])
        calls = self._calls.setdefault(index, {})
        for part in delta.get("tool_calls", ()):
            call = calls.get(part["index"])
            if call is None:
                whole = {name: value for name, value in part.items() if name != "index"}
                calls[part["index"]] = {**whole, "function": dict(part["function"])}
            else:
                call["function"]["arguments"] += part["function"]["arguments"]

    def _message(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._text(index, "content"), "refusal": None}
        calls = self._calls.get(index)
        if calls:
            # OpenAI's: no content is null, but only where something else is.
            message["content"] = message["content"] or None
            message["tool_calls"] = [call for _, call in sorted(calls.items())]
        if reasoning := self._text(index, "reasoning_content"):
            message["reasoning_content"] = reasoning
        return message

    def _text(self, index: int, name: str) -> str:
        return "".join(self._pieces.get((index, name), ()))

    @staticmethod
    def _append_logprobs(choice: Choice, logprobs: dict[str, Any] | None) -> None:
        if logprobs is None:
            return
        known = choice["logprobs"]
        if known is None:
            choice["logprobs"] = logprobs
            return
        for name, values in logprobs.items():
            if values is not None:
                known[name].extend(values)
