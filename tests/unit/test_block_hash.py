"""Block hashes: equal exactly when salt, block size, seed and the whole prefix are equal."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.kv_cache.block_hash import BlockHasher


def hashes_of(token_ids: list[int], *, salt: str = "", block_size: int = 2, seed: str = "seed") -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(block_size, seed).extend(hashes, len(token_ids), lambda start, end: token_ids[start:end], salt)
    return hashes


def test_only_full_blocks_have_a_hash() -> None:
    for num_tokens, num_blocks in [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]:
        assert len(hashes_of(list(range(num_tokens)))) == num_blocks


@pytest.mark.regression(24)
def test_hash_is_sha256_over_parent_tokens_and_salt() -> None:
    token_ids = [1, 2**31, 3, 4]
    root = hashlib.sha256(b"2:seed").digest()
    first = hashlib.sha256(root + struct.pack("<2I", *token_ids[:2]) + b"tenant").digest()
    # The salt is in the first block only; the parent hash carries it on.
    second = hashlib.sha256(first + struct.pack("<2I", *token_ids[2:])).digest()
    assert hashes_of(token_ids, salt="tenant") == [first, second]


def test_hash_does_not_change_between_releases_and_processes() -> None:
    """Engines of one pool, and frontends that route by prefix, must agree."""
    assert [value.hex()[:16] for value in hashes_of([5, 6, 7, 8], salt="t")] == ["d1ac39fa655bb68a", "40c65ac883dce906"]


def test_equal_block_after_another_beginning_differs() -> None:
    assert hashes_of([1, 1, 9, 9])[1] != hashes_of([1, 2, 9, 9])[1]


def test_block_of_repeated_tokens_differs_at_each_position() -> None:
    assert len(set(hashes_of([7] * 10))) == 5


@pytest.mark.regression(24)
def test_salts_share_no_block() -> None:
    token_ids = list(range(8))
    salted = [set(hashes_of(token_ids, salt=salt)) for salt in ("", "a", "b")]
    assert len(set.union(*salted)) == 12


def test_seed_and_block_size_take_part() -> None:
    token_ids = [1, 2, 3, 4]
    assert hashes_of(token_ids, seed="other")[0] != hashes_of(token_ids)[0]
    # A seed that looks like another block size must not pass for it.
    assert hashes_of(token_ids, block_size=4)[0] != hashes_of(token_ids)[1]


blocks = st.lists(st.integers(0, 3), min_size=2, max_size=2)


@settings(derandomize=True, deadline=None)
@given(
    left=st.lists(blocks, min_size=1, max_size=4),
    right=st.lists(blocks, min_size=1, max_size=4),
    salts=st.tuples(*[st.sampled_from(["", "\x00", "a", "aa"])] * 2),
)
def test_last_hash_is_equal_exactly_for_equal_prefix_and_salt(
    left: list[list[int]], right: list[list[int]], salts: tuple[str, str]
) -> None:
    left_hash = hashes_of([token for block in left for token in block], salt=salts[0])[-1]
    right_hash = hashes_of([token for block in right for token in block], salt=salts[1])[-1]
    assert (left_hash == right_hash) == ((left, salts[0]) == (right, salts[1]))


@settings(derandomize=True, deadline=None)
@given(token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=20), cuts=st.lists(st.integers(0, 20)))
def test_growing_hashes_equal_hashes_at_once(token_ids: list[int], cuts: list[int]) -> None:
    hasher = BlockHasher(3, "seed")
    hashes: list[bytes] = []
    for num_tokens in sorted(min(cut, len(token_ids)) for cut in [*cuts, 20]):
        # Only what is known so far may be asked for.
        known = token_ids[:num_tokens]
        hasher.extend(hashes, num_tokens, lambda start, end, known=known: known[start:end], "salt")
    assert hashes == hashes_of(token_ids, salt="salt", block_size=3)
