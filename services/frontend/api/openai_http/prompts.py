"""What OpenAI calls a prompt or an input: one text, several, or token ids of one or several. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from frontend.api.openai_http.fields import UInt32


class _FailFast(FailFast):
    """Unions hash their members."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


# More are never taken at once, whatever the limit of a server is.
MAX_PROMPTS = 16 * 1024
# Above every context there is.
MAX_TOKEN_IDS = 2 * 1024 * 1024

_Strings = Annotated[list[str], _FailFast(), Field(max_length=MAX_PROMPTS)]
_TokenIds = Annotated[list[UInt32], _FailFast(), Field(max_length=MAX_TOKEN_IDS)]
_TokenIdLists = Annotated[list[_TokenIds], _FailFast(), Field(max_length=MAX_PROMPTS)]
# In this order, and each given up at its first mistake: a prompt may have a hundred thousand ids.
Prompts = Annotated[str | _Strings | _TokenIds | _TokenIdLists, Field(union_mode="left_to_right")]


def as_list(given: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    """Each of them by itself."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    return given  # type: ignore[return-value]  # not ints, as the first is none
