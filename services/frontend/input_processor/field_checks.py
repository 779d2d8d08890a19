"""Collects everything that is wrong with one request, so that the caller hears of all of it at once. Pure.

Fields are named by their path in GenerateRequest; texts name the value and the limit, never prompt text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepwire.errors import FieldViolation, InvalidRequestError

# Enough to mend a request by; more would cost time on the event loop and find no room in the answer.
MAX_VIOLATIONS = 16


class FieldChecks:
    """Violations found so far. Checks return whether the value is good."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []
        self._reasons: set[str] = set()

    def add(self, field: str, description: str, *, reason: str = InvalidRequestError.default_reason) -> None:
        """Note a violation; further ones are dropped when there are many already."""
        if len(self._violations) < MAX_VIOLATIONS:
            self._violations.append(FieldViolation(field, description))
            self._reasons.add(reason)

    def require(self, is_good: bool, field: str, description: str) -> bool:
        if not is_good:
            self.add(field, description)
        return is_good

    def number(self, field: str, value: float, low: float, high: float, *, is_low_open: bool = False) -> bool:
        """A finite number in [low, high], or in (low, high]."""
        is_inside = math.isfinite(value) and value <= high and (value > low if is_low_open else value >= low)
        bracket = "(" if is_low_open else "["
        upper = "infinity)" if math.isinf(high) else f"{high:g}]"
        return self.require(is_inside, field, f"{value:g} is outside {bracket}{low:g}, {upper}")

    def integer(self, field: str, value: int, low: int, high: int) -> bool:
        return self.require(low <= value <= high, field, f"{value} is outside {low}..{high}")

    def token_ids(
        self,
        field: str,
        token_ids: Sequence[int],
        vocab_size: int,
        *,
        max_count: int | None = None,
        first_index: int = 0,
    ) -> bool:
        """Ids of the vocabulary, not more than the limit; the first that is none is named.

        `first_index` is the place of the first id in the field, of which these may be the end only.
        """
        count = len(token_ids)
        if max_count is not None and count > max_count:
            self.add(field, f"{count} token ids, at most {max_count} are allowed")
            return False
        # The common case without a Python loop: a prompt may have a hundred thousand ids.
        if not token_ids or max(token_ids) < vocab_size:
            return True
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        self.add(f"{field}[{first_index + index}]", f"token id {token_ids[index]} is outside 0..{vocab_size - 1}")
        return False

    def strings(self, field: str, strings: Sequence[str], *, max_count: int, max_chars: int) -> bool:
        """Non-empty strings, neither more nor longer than the limits."""
        if not self.require(
            len(strings) <= max_count, field, f"{len(strings)} strings, at most {max_count} are allowed"
        ):
            return False
        bad = {index: len(text) for index, text in enumerate(strings) if not 1 <= len(text) <= max_chars}
        for index, num_chars in bad.items():
            too_long = f"{num_chars} characters, at most {max_chars} are allowed"
            self.add(f"{field}[{index}]", too_long if num_chars else "the string is empty")
        return not bad

    def raise_if_any(self) -> None:
        """Raise InvalidRequestError with every violation noted, if there is one.

        A reason of its own (CONTEXT_LENGTH_EXCEEDED) is given only when nothing else is wrong.
        """
        if not self._violations:
            return
        reason = self._reasons.pop() if len(self._reasons) == 1 else InvalidRequestError.default_reason
        message = "; ".join(f"{item.field}: {item.description}" for item in self._violations)
        raise InvalidRequestError(message, reason=reason, violations=tuple(self._violations))
