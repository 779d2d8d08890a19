"""JSON bodies that are meant badly: good ones with fields of any name set to anything, and text that is hardly JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from hypothesis import strategies as st

from fakes.hostile_messages import Words, texts

_NUMBERS = (0, -1, 1, 2, 2**31, 2**32, 2**63, 2**64, 10**400, 1e-9, 1.5, 1e308, -0.0, math.nan, math.inf, -math.inf)
# What Python's own encoder never writes.
_FRAGMENTS = (
    b'"\\ud800"',
    b'"\\u0000"',
    b'"\xff\xfe"',
    b'"\xed\xa0\x80"',
    b"1e999",
    b"-0",
    b"00",
    b"[" * 20_000,
    b"[" * 100 + b"]" * 100,
    b'{"a":' * 300 + b"1" + b"}" * 300,
    b'{"a":1,"a":2}',
    b"1" * 5000,
    b"\xef\xbb\xbf{}",
    b"",
)

_leaves = st.none() | st.booleans() | st.sampled_from(_NUMBERS) | st.floats()


def values(words: Words) -> st.SearchStrategy[object]:
    """Any JSON whose strings are some of these."""
    return st.recursive(
        _leaves | words,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
        max_leaves=8,
    )


@st.composite
def bodies(draw: st.DrawFn, good: Sequence[dict[str, object]], names: Sequence[str], words: Words = texts) -> bytes:
    """One of the good bodies with some fields of these names set, as bytes that may be spoilt."""
    body = dict(draw(st.sampled_from(good)))
    for name in draw(st.lists(st.sampled_from(names), max_size=3)):
        body[name] = draw(values(words))
    data = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    match draw(st.sampled_from(("whole", "whole", "whole", "put in", "alone", "cut"))):
        case "put in":
            name = json.dumps(draw(st.sampled_from(names))).encode()
            return data[:-1] + b"," + name + b":" + draw(st.sampled_from(_FRAGMENTS)) + b"}"
        case "alone":
            return draw(st.sampled_from(_FRAGMENTS)) or json.dumps(draw(values(words))).encode()
        case "cut":
            return data[: draw(st.integers(0, len(data)))]
    return data
