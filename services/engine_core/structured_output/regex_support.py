"""Which regular expressions are refused before the compiler sees them: it would ignore a part, crash, or never end.

Upper bounds by simple counting: an escaped or bracketed character may count too much, never too little. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate

# The compiler's parser calls itself for each level; the stack of a thread ends near 30 000.
MAX_NESTING = 200
# The time of a compile grows with more than the square of optional and repeated parts: so many take a second.
MAX_QUANTIFIERS = 500
_LOOK_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")
_QUANTIFIER = re.compile(r"[?*+]|\{\d*,?\d*\}")


def unsupported_in_regex(text: str) -> Iterator[str]:
    """What of it, in words that quote nothing."""
    if _LOOK_AROUND.search(text):
        yield "look-ahead or look-behind"
    if max(accumulate((char == "(") - (char == ")") for char in text), default=0) > MAX_NESTING:
        yield f"parentheses nested deeper than {MAX_NESTING}"
    if sum(1 for _ in _QUANTIFIER.finditer(text)) > MAX_QUANTIFIERS:
        yield f"more than {MAX_QUANTIFIERS} quantifiers"
