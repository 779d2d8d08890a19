"""KVCacheManager with several groups of layers: what a window has passed, and what all groups can start from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine_core.kv_cache.block_hash import BlockHasher
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.kv_cache.prefix_lookup import PrefixHit
from fakes.request_factory import make_layout

SIZE = 4
STEP = 8


def make_manager(num_blocks: int, windows: Sequence[int | None]) -> KVCacheManager:
    """Blocks for data, and the null block."""
    return KVCacheManager(num_blocks + 1, make_layout(SIZE, windows, STEP))


class User:
    """A sequence that is computed step by step, as the scheduler does it."""

    def __init__(self, manager: KVCacheManager, key: str, token_ids: Sequence[int]) -> None:
        self.manager, self.key, self.token_ids = manager, key, list(token_ids)
        self.hashes: list[bytes] = []
        BlockHasher(SIZE, "seed").extend(self.hashes, len(self.token_ids), self.slice, "")
        self.num_computed = 0

    def slice(self, start: int, end: int) -> list[int]:
        return self.token_ids[start:end]

    def hit(self) -> PrefixHit:
        hit = self.manager.get_computed_blocks(self.hashes, self.slice, len(self.token_ids))
        # Nothing collides here, so that hashes tell the same.
        assert self.manager.num_cached_tokens(self.hashes, len(self.token_ids)) == hit.num_tokens
        return hit

    def start(self, num_tokens: int) -> tuple[list[int], ...] | None:
        hit = self.hit()
        self.num_computed = hit.num_tokens
        return self._computed(self.manager.allocate_slots(self.key, hit.num_tokens + num_tokens, hit), num_tokens)

    def step(self, num_tokens: int, fence_step: int = 0) -> tuple[list[int], ...] | None:
        added = self.manager.allocate_slots(
            self.key, self.num_computed + num_tokens, num_computed_tokens=self.num_computed, fence_step=fence_step
        )
        return self._computed(added, num_tokens)

    def _computed(self, added: tuple[list[int], ...] | None, num_tokens: int) -> tuple[list[int], ...] | None:
        if added is not None:
            self.num_computed += num_tokens
            self.manager.register_full_blocks(self.key, self.hashes, self.slice, self.num_computed)
        assert self.manager.check_integrity() == []
        return added

    def run(self) -> None:
        self.start(min(STEP, len(self.token_ids) - self.hit().num_tokens))
        while self.num_computed < len(self.token_ids):
            assert self.step(min(STEP, len(self.token_ids) - self.num_computed)) is not None
        self.manager.free(self.key)


def test_each_group_gets_blocks_of_its_own() -> None:
    user = User(make_manager(8, [None, 5]), "a", range(20))
    assert user.start(8) == ([1, 2], [3, 4])
    assert user.step(1) == ([5], [6])
    assert user.step(1) == ()
    assert user.manager.num_blocks("a") == 6 - 1


def test_what_the_window_has_passed_is_given_back_and_the_rest_of_the_table_stays() -> None:
    manager = make_manager(8, [5])
    user = User(manager, "a", range(30))
    user.start(8)
    user.step(8)
    # Token 16 sees 12 .. 16.
    user.step(1)
    assert manager.block_ids("a") == ([0, 0, 0, 4, 5],)
    assert manager.num_blocks("a") == 2
    assert manager.pool.num_used == 2
    manager.free("a")
    assert manager.pool.num_used == 0


def test_it_can_be_hit_until_it_is_handed_out_again() -> None:
    manager = make_manager(8, [5])
    user = User(manager, "a", range(30))
    for num_tokens in (8, 8, 1):
        (user.step if user.num_computed else user.start)(num_tokens)
    # The first 8 tokens, whose last block was given back: tokens 4 .. 7 are what token 8 sees.
    early = User(manager, "b", range(9))
    assert early.hit().num_tokens == 8
    assert early.start(1) == ([0, 2, 6],)


def test_it_waits_for_the_steps_in_flight() -> None:
    manager = make_manager(4, [5])
    user = User(manager, "a", range(40))
    user.start(8)
    user.step(8, fence_step=1)
    # Block 1 was out of sight when step 2 was planned, blocks 2 and 3 are so now; steps 1 and 2 may still use them.
    assert user.step(4, fence_step=2) is None
    assert manager.num_fenced_blocks == 3
    manager.release_fenced(1)
    assert user.step(4, fence_step=2) == ([1],)
    assert user.step(4, fence_step=3) is None
    manager.release_fenced(2)
    assert user.step(4, fence_step=3) == ([3],)


def test_all_groups_get_what_they_need_or_none() -> None:
    manager = make_manager(5, [None, 50])
    user = User(manager, "a", range(30))
    user.start(8)
    assert user.step(4) is None
    assert manager.block_ids("a") == ([1, 2], [3, 4])
    assert manager.pool.num_available == 1


def test_a_block_of_one_group_is_no_hit_of_another() -> None:
    manager = make_manager(20, [None, 50])
    User(manager, "a", range(9)).run()
    hit = User(manager, "b", range(9)).hit()
    rows = [[block.block_id for block in row] for row in hit.rows]
    assert hit.num_tokens == 8
    assert not set(rows[0]) & set(rows[1])
    # One block of one group goes, the second of full attention: the other group still has all, and the hit is shorter.
    manager.pool.allocate(17)
    assert User(manager, "b", range(9)).hit().num_tokens == 4


def test_a_hit_needs_only_the_window_before_its_end() -> None:
    manager = make_manager(20, [None, 5])
    User(manager, "a", range(33)).run()
    again = User(manager, "b", range(33))
    rows = [[block.block_id for block in row] for row in again.hit().rows]
    assert [len(row) for row in rows] == [8, 8]
    assert rows[1][:7] == [0] * 7
    assert 0 not in rows[0]
    assert again.start(1) is not None
    assert manager.num_blocks("b") == 9 + 2


def test_a_window_may_pass_before_the_last_token_of_a_block_is_known() -> None:
    """With steps in flight: the block is given back without a hash, and the null block gets none either."""
    manager = make_manager(8, [2])
    user = User(manager, "a", range(3))
    user.start(3)
    for _ in range(4):
        user.step(1)
    user.token_ids = list(range(8))
    BlockHasher(SIZE, "seed").extend(user.hashes, 8, user.slice, "")
    user.step(1)
    assert manager.block_ids("a") == ([0, 2],)
    assert manager.pool.null_block.block_hash is None


def test_a_long_request_fits_where_its_window_fits() -> None:
    manager = make_manager(4, [5])
    assert manager.can_ever_fit(1000)
    assert manager.can_allocate(1000)
    assert not manager.can_allocate(1000, num_reserved=1)
    assert not make_manager(4, [5, None]).can_ever_fit(1000)


@pytest.mark.parametrize("num_tokens", [9, 13, 33, 60])
def test_a_cached_beginning_never_keeps_a_request_out_of_an_empty_cache(num_tokens: int) -> None:
    """Its blocks come back when the window passes them; counted twice, the request would wait for ever."""
    manager = make_manager(4, [5])
    User(manager, "a", range(num_tokens - 1)).run()
    again = User(manager, "b", range(num_tokens + 40))
    assert again.hit().num_tokens > 0
    assert manager.can_allocate(num_tokens + 40, again.hit())
    again.run()


def test_self_check_sees_a_hole_in_a_table() -> None:
    manager = make_manager(8, [5])
    User(manager, "a", range(30)).start(8)
    manager._tables["a"].rows[0][1] = manager.pool.null_block
    assert any("holes" in found for found in manager.check_integrity())


def test_the_tail_goes_first_in_every_group() -> None:
    """Half of the cache is handed out: what is left of a freed request is its beginning, in all groups."""
    manager = KVCacheManager(2 * 10 + 1, make_layout(4, (None, None), 40))
    token_ids = list(range(40))
    hashes: list[bytes] = []
    BlockHasher(4, "seed").extend(hashes, 40, lambda start, end: token_ids[start:end], "")
    manager.allocate_slots("first", 40)
    manager.register_full_blocks("first", hashes, lambda start, end: token_ids[start:end], 40)
    manager.free("first")
    manager.allocate_slots("second", 20)
    assert manager.get_computed_blocks(hashes, lambda start, end: token_ids[start:end], 40).num_tokens == 20
