"""Packed log-probabilities on their way to the caller: rows of tokens that are held back, and rows of a prompt.

Pure, owned by the output processor. Rows are counted and cut here, never unpacked. What an engine sends must fit its
tokens: a ValueError fails the one request.
"""

from __future__ import annotations

from frontend.engine_outputs import EngineOutput
from stepwire.packed_logprobs import PackedLogprobs


class HeldLogprobs:
    """One row for each token of a choice that was not handed out yet. Tokens leave in order, and so do the rows."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows: PackedLogprobs | None = None

    def append(self, rows: PackedLogprobs | None, num_tokens: int) -> None:
        """The rows of the next tokens."""
        if not num_tokens:
            return
        if rows is None:
            raise ValueError(f"{num_tokens} tokens came without log-probabilities")
        _require(rows, num_tokens, self._width)
        self._rows = rows if self._rows is None else PackedLogprobs.join([self._rows, rows])

    def take(self, num_tokens: int) -> PackedLogprobs | None:
        """The rows of the first `num_tokens` tokens; None for no token."""
        if self._rows is None or not num_tokens:
            return None
        taken, self._rows = self._rows.rows(0, num_tokens), self._rows.rows(num_tokens)
        return taken


class PromptLogprobs:
    """Collects the rows of a prompt, which the first choice's request brings chunk by chunk."""

    def __init__(self, handle: int, num_prompt_tokens: int, width: int) -> None:
        self._handle = handle
        self._width = width
        # The first token has no predecessor and no row.
        self._num_expected = num_prompt_tokens - 1
        self._parts: list[PackedLogprobs] = []
        self._is_complete = False

    def take(self, output: EngineOutput) -> list[PackedLogprobs] | None:
        """The parts once they are complete, which is with the first token of output; before and afterwards None."""
        if output.handle != self._handle or self._is_complete:
            return None
        if output.prompt_logprobs is not None:
            _require(output.prompt_logprobs, output.prompt_logprobs.num_rows, self._width)
            self._parts.append(output.prompt_logprobs)
        if not output.new_token_ids:
            return None
        num_rows = sum(part.num_rows for part in self._parts)
        if num_rows != self._num_expected:
            raise ValueError(f"{num_rows} rows came for a prompt that needs {self._num_expected}")
        self._is_complete = True
        parts, self._parts = self._parts, []
        return parts


def _require(rows: PackedLogprobs, num_rows: int, width: int) -> None:
    rows.require_rows(num_rows)
    if rows.width != width:
        raise ValueError(f"rows of {rows.width} entries came, {width} were asked for")
