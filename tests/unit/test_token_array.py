"""Token ids on the wire."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwire import token_array


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_round_trip_and_byte_order(token_ids: list[int]):
    data = token_array.pack(token_ids)
    assert data == struct.pack(f"<{len(token_ids)}I", *token_ids)
    assert token_array.unpack(data) == token_ids


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_ids_outside_uint32_are_refused(token_id: int):
    with pytest.raises(OverflowError):
        token_array.pack([token_id])


def test_cut_arrays_are_refused():
    with pytest.raises(ValueError, match="5 bytes"):
        token_array.unpack(b"12345")
