"""Token ids on the wire: little-endian uint32 bytes, so that neither side builds one object per token."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

# array("I") is 4 bytes wide on every platform CPython supports; the check keeps that an error and not a surprise.
if array("I").itemsize != 4:
    raise ImportError("stepwire needs a platform whose unsigned int has 32 bits")


def pack(token_ids: Sequence[int]) -> bytes:
    """Encode ids; raises OverflowError for an id outside uint32."""
    values = array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack(data: bytes) -> list[int]:
    """Decode ids; raises ValueError when the length is no multiple of 4."""
    if len(data) % 4:
        raise ValueError(f"a token array of {len(data)} bytes is not a multiple of 4")
    values = array("I", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
