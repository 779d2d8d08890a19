"""Log-probabilities in the two shapes of OpenAI: parallel lists in completions, one object a token in chats. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stepwire.v1.common_pb2 import Logprob, TokenLogprobs

# JSON has no minus infinity; this is what OpenAI writes for it.
LEAST = -9999.0


def chat_logprobs(rows: Iterable[TokenLogprobs]) -> dict[str, Any]:
    content = [{**_entry(row.sampled), "top_logprobs": [_entry(top) for top in row.top]} for row in rows]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Of one choice; counts the characters before each token."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, rows: Iterable[TokenLogprobs], first_token: str | None = None) -> dict[str, Any]:
        """`first_token`: the first row has no log-probability, because nothing precedes its token."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for row in rows:
            is_first = first_token is not None and not lists["tokens"]
            token = first_token if is_first else _text(row.sampled)
            lists["tokens"].append(token)
            lists["token_logprobs"].append(None if is_first else _value(row.sampled))
            lists["top_logprobs"].append(None if is_first else _top(row))
            lists["text_offset"].append(self._offset)
            self._offset += len(token or "")
        return lists


def _top(row: TokenLogprobs) -> dict[str, float]:
    """The most likely, and the token itself if it is not one of them."""
    top = {_text(entry): _value(entry) for entry in reversed(row.top)}
    return {_text(row.sampled): _value(row.sampled)} | top


def _entry(given: Logprob) -> dict[str, Any]:
    return {"token": _text(given), "logprob": _value(given), "bytes": list(given.token_bytes)}


def _text(given: Logprob) -> str:
    return given.token_bytes.decode("utf-8", "replace")


def _value(given: Logprob) -> float:
    return max(given.logprob, LEAST)
