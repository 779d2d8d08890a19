"""Packed rows: cutting and joining loses nothing, and what is no whole number of rows is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwire.packed_logprobs import PackedLogprobs, num_entries

UINT32 = st.integers(0, 2**32 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


def packed(width: int, ids: list[int], values: list[float], ranks: list[int]) -> PackedLogprobs:
    return PackedLogprobs(
        width,
        struct.pack(f"<{len(ids)}I", *ids),
        struct.pack(f"<{len(values)}f", *values),
        struct.pack(f"<{len(ranks)}I", *ranks),
    )


@st.composite
def all_rows(draw: st.DrawFn) -> tuple[PackedLogprobs, list[int], list[float], list[int]]:
    width, num_rows = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    ids = draw(st.lists(UINT32, min_size=width * num_rows, max_size=width * num_rows))
    values = draw(st.lists(FLOAT32, min_size=width * num_rows, max_size=width * num_rows))
    ranks = draw(st.lists(UINT32, min_size=num_rows, max_size=num_rows))
    return packed(width, ids, values, ranks), ids, values, ranks


@given(all_rows())
def test_unpack_gives_little_endian_values(rows) -> None:
    assert rows[0].unpack() == rows[1:]
    rows[0].require_rows(len(rows[3]))


@given(all_rows(), st.data())
def test_pieces_join_to_the_whole(rows, data) -> None:
    whole = rows[0]
    at = data.draw(st.integers(0, whole.num_rows))
    first, second = whole.rows(0, at), whole.rows(at)
    assert (first.num_rows, second.num_rows) == (at, whole.num_rows - at)
    assert PackedLogprobs.join([first, second]) == whole
    assert whole.num_bytes == whole.num_rows * whole.row_bytes


def test_rows_of_different_width_are_not_joined() -> None:
    narrow, wide = packed(1, [1], [0.0], [1]), packed(2, [1, 2], [0.0, 0.0], [1])
    with pytest.raises(ValueError, match=r"rows of \[1, 2\] entries"):
        PackedLogprobs.join([narrow, wide])


@pytest.mark.parametrize(
    "broken",
    [
        PackedLogprobs(0, b"", b"", b""),
        packed(1, [1], [0.0], [1]),
        packed(1, [1, 2], [0.0], [1, 1]),
        packed(1, [1, 2, 3], [0.0, 0.0, 0.0], [1, 1]),
        PackedLogprobs(1, b"12345678", b"12345678", b"1234567"),
    ],
    ids=["no entries", "too few rows", "short values", "long ids", "odd bytes"],
)
def test_what_is_no_two_rows_is_refused(broken: PackedLogprobs) -> None:
    with pytest.raises(ValueError, match="2 rows"):
        broken.require_rows(2)


@pytest.mark.parametrize(("asked", "expected"), [(0, 0), (7, 7), (100, 50), (-1, 50)])
def test_number_of_entries_never_exceeds_the_vocabulary(asked: int, expected: int) -> None:
    assert num_entries(asked, 50) == expected
