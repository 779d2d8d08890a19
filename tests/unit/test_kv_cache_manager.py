"""KVCacheManager: look-up, all-or-nothing allocation, registration of full blocks, and release in reverse."""

from __future__ import annotations

import pytest

from engine_core.kv_cache.block import KVCacheBlock
from engine_core.kv_cache.block_hash import BlockHasher
from engine_core.kv_cache.kv_cache_manager import BlockIds, KVCacheManager
from engine_core.kv_cache.prefix_lookup import PrefixHit
from fakes.request_factory import make_layout
from stepwire.errors import InvariantViolation

SIZE = 4


class User:
    """A sequence of known tokens as the manager's callers hold it."""

    def __init__(self, manager: KVCacheManager, key: str, token_ids: list[int], salt: str = "") -> None:
        self.manager = manager
        self.key = key
        self.token_ids = token_ids
        self.hashes: list[bytes] = []
        BlockHasher(SIZE, "seed").extend(self.hashes, len(token_ids), self.slice, salt)

    def slice(self, start: int, end: int) -> list[int]:
        return self.token_ids[start:end]

    def hit(self) -> PrefixHit:
        return self.manager.get_computed_blocks(self.hashes, self.slice, len(self.token_ids))

    def look_up(self) -> list[KVCacheBlock]:
        """Of the only group of layers."""
        hit = self.hit()
        blocks = [block for row in hit.rows for block in row]
        assert hit.num_tokens == len(blocks) * SIZE
        return blocks

    def allocate(self) -> list[int] | None:
        return only_group(self.manager.allocate_slots(self.key, len(self.token_ids), self.hit()))

    def compute(self, num_tokens: int) -> None:
        self.manager.register_full_blocks(self.key, self.hashes, self.slice, num_tokens)

    def run(self) -> list[int] | None:
        """Allocate, compute all, release."""
        added = self.allocate()
        self.compute(len(self.token_ids))
        self.manager.free(self.key)
        return added


def only_group(block_ids: BlockIds | None) -> list[int] | None:
    """The ids of the only group of layers; none is no group."""
    return None if block_ids is None else [block_id for group_ids in block_ids for block_id in group_ids]


def counts(manager: KVCacheManager) -> tuple[int, int, int]:
    pool = manager.pool
    return pool.num_used, pool.num_cached, pool.num_available


@pytest.fixture
def manager() -> KVCacheManager:
    """8 blocks for data, 4 slots each."""
    return KVCacheManager(9, make_layout(SIZE))


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_number_of_blocks(manager: KVCacheManager, num_tokens: int, num_blocks: int) -> None:
    assert manager.layout.num_blocks_for(num_tokens) == num_blocks


def test_whole_cache_can_fit_and_one_token_more_never(manager: KVCacheManager) -> None:
    assert manager.can_ever_fit(8 * SIZE)
    assert not manager.can_ever_fit(8 * SIZE + 1)


def test_table_grows_only_when_a_block_is_full(manager: KVCacheManager) -> None:
    assert only_group(manager.allocate_slots("a", 3)) == [1]
    assert only_group(manager.allocate_slots("a", 4)) == []
    assert only_group(manager.allocate_slots("a", 5)) == [2]
    assert only_group(manager.allocate_slots("a", 13)) == [3, 4]
    assert only_group(manager.block_ids("a")) == [1, 2, 3, 4]


def test_what_does_not_fit_changes_nothing(manager: KVCacheManager) -> None:
    User(manager, "old", list(range(10))).run()
    manager.allocate_slots("a", 20)
    again = User(manager, "b", [*range(8), *range(100, 130)])
    hits = again.look_up()
    before = counts(manager)
    assert len(hits) == 2
    assert again.allocate() is None
    assert manager.allocate_slots("a", 33) is None
    assert counts(manager) == before
    assert only_group(manager.block_ids("b")) == []
    assert manager.num_blocks("a") == 5
    assert [block.ref_count for block in hits] == [0, 0]
    assert manager.check_integrity() == []


@pytest.mark.parametrize(("num_tokens", "num_hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (20, 2)])
def test_last_known_token_is_always_computed(manager: KVCacheManager, num_tokens: int, num_hits: int) -> None:
    User(manager, "old", list(range(10))).run()
    assert len(User(manager, "new", list(range(num_tokens))).look_up()) == num_hits


def test_hit_ends_at_the_first_other_block(manager: KVCacheManager) -> None:
    User(manager, "old", list(range(16))).run()
    other_middle = [*range(4), 99, *range(5, 16), 1]
    assert len(User(manager, "new", other_middle).look_up()) == 1


def test_hit_shares_the_blocks(manager: KVCacheManager) -> None:
    old = User(manager, "old", list(range(9)))
    assert old.allocate() == [1, 2, 3]
    old.compute(9)
    assert User(manager, "new", list(range(10))).allocate() == [1, 2, 4]
    manager.free("old")
    assert only_group(manager.block_ids("new")) == [1, 2, 4]
    assert counts(manager) == (3, 0, 5)
    assert manager.check_integrity() == []


def test_salts_share_nothing(manager: KVCacheManager) -> None:
    User(manager, "old", list(range(9)), "tenant a").run()
    assert User(manager, "b", list(range(9)), "tenant b").look_up() == []
    assert User(manager, "none", list(range(9))).look_up() == []
    assert len(User(manager, "a", list(range(9)), "tenant a").look_up()) == 2


def test_collision_is_a_miss() -> None:
    manager = KVCacheManager(9, make_layout(SIZE), verify_hits=True)
    User(manager, "old", list(range(9))).run()
    forged = User(manager, "new", list(range(9)))
    forged.token_ids = [0, 1, 2, 3, 4, 5, 6, 99, 8]
    assert len(forged.look_up()) == 1
    assert manager.pool.num_collisions == 1


def test_nothing_is_found_before_it_is_computed(manager: KVCacheManager) -> None:
    old = User(manager, "old", list(range(13)))
    old.allocate()
    new = User(manager, "new", list(range(13)))
    for num_computed, num_hits in [(0, 0), (3, 0), (4, 1), (7, 1), (12, 3)]:
        old.compute(num_computed)
        assert len(new.look_up()) == num_hits


def test_without_caching_there_are_no_hits() -> None:
    manager = KVCacheManager(9, make_layout(SIZE), enable_caching=False)
    User(manager, "old", list(range(9))).run()
    assert User(manager, "new", list(range(9))).look_up() == []
    assert counts(manager) == (0, 0, 8)


def test_free_hits_are_not_available_to_anyone_else(manager: KVCacheManager) -> None:
    User(manager, "old", list(range(9))).run()
    manager.allocate_slots("a", 5 * SIZE)
    new = User(manager, "new", list(range(13)))
    # Three blocks are available; the two hits are among them, so that one new block is left.
    assert manager.can_allocate(12, new.hit())
    assert manager.can_allocate(12, new.hit(), num_reserved=0)
    assert not manager.can_allocate(12, new.hit(), num_reserved=1)
    assert not manager.can_allocate(13, new.hit())
    assert new.allocate() is None


def test_tail_of_a_request_is_evicted_before_its_beginning(manager: KVCacheManager) -> None:
    User(manager, "old", list(range(16))).run()
    # Free are now: the 4 blocks never used, then the old ones from the tail on.
    assert only_group(manager.allocate_slots("a", 6 * SIZE)) == [5, 6, 7, 8, 4, 3]
    assert len(User(manager, "new", list(range(16))).look_up()) == 2


def test_partial_tail_is_handed_out_before_any_content(manager: KVCacheManager) -> None:
    User(manager, "old", list(range(9))).run()
    assert only_group(manager.allocate_slots("a", 1)) == [3]


def test_release_is_complete_and_idempotent(manager: KVCacheManager) -> None:
    manager.allocate_slots("a", 9)
    manager.free("a")
    manager.free("a")
    manager.free("never seen")
    assert counts(manager) == (0, 0, 8)
    assert only_group(manager.block_ids("a")) == []
    assert manager.check_integrity() == []


@pytest.mark.regression("fenced frees keep eviction order")
@pytest.mark.parametrize("fence_steps", [(0, 0), (1, 1), (1, 2), (0, 1)])
def test_fenced_blocks_come_back_in_the_order_in_which_they_were_freed(
    manager: KVCacheManager, fence_steps: tuple[int, int]
) -> None:
    """As without fences: the tail of the first one goes first, and the beginning of the last one stays longest."""
    users = [User(manager, "first", list(range(16))), User(manager, "second", list(range(50, 66)))]
    for user in users:
        user.allocate()
        user.compute(16)
    for user, fence_step in zip(users, fence_steps, strict=True):
        manager.free(user.key, fence_step)
    assert manager.num_fenced_blocks == 4 * sum(fence_step > 0 for fence_step in fence_steps)
    for step in (1, 2):
        manager.release_fenced(step)
    assert manager.num_fenced_blocks == 0
    assert manager.check_integrity() == []
    assert only_group(manager.allocate_slots("next", 8 * SIZE)) == [4, 3, 2, 1, 8, 7, 6, 5]


def test_computed_blocks_can_only_start_a_table(manager: KVCacheManager) -> None:
    User(manager, "old", list(range(9))).run()
    new = User(manager, "new", list(range(9)))
    manager.allocate_slots("new", 3)
    with pytest.raises(InvariantViolation, match="new"):
        new.allocate()


def test_self_check_sees_a_shared_block_that_is_not_full(manager: KVCacheManager) -> None:
    manager.allocate_slots("a", 3)
    manager.allocate_slots("b", 5, PrefixHit(SIZE, ([manager.pool.blocks[1]],)))
    assert any("shared and not full" in found for found in manager.check_integrity())


def test_self_check_sees_a_block_without_table(manager: KVCacheManager) -> None:
    manager.pool.allocate(1)
    assert manager.check_integrity() != []
