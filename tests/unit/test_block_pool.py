"""BlockPool and its free list: order of eviction, content, reference counts, and the self-check."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine_core.kv_cache.block import KVCacheBlock
from engine_core.kv_cache.block_pool import BlockPool
from stepwire.errors import InvariantViolation


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def fill(pool: BlockPool, *contents: int) -> list[KVCacheBlock]:
    """Take one block for each content and make it findable."""
    blocks = pool.allocate(len(contents))
    for block, content in zip(blocks, contents, strict=True):
        pool.register(block, b"hash-%d" % content, [content])
    return blocks


def find(pool: BlockPool, content: int) -> KVCacheBlock | None:
    return pool.find(b"hash-%d" % content, [content])


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert pool.num_total == 3
    assert ids(pool.allocate(3)) == [1, 2, 3]
    assert pool.null_block.block_id == 0
    with pytest.raises(InvariantViolation):
        pool.allocate(1)


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_pool_without_room_for_data_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}"):
        BlockPool(num_blocks)


def test_least_recently_freed_content_is_evicted_first() -> None:
    pool = BlockPool(5)
    a, b, c, d = fill(pool, 10, 11, 12, 13)
    pool.free([c])
    pool.free([a, d])
    pool.free([b])
    assert ids(pool.allocate(4)) == ids([c, a, d, b])
    assert pool.num_evictions == 4


def test_blocks_without_content_go_before_all_content() -> None:
    pool = BlockPool(4)
    with_content = fill(pool, 10, 11)
    without = pool.allocate(1)
    pool.free(with_content)
    pool.free(without)
    assert ids(pool.allocate(1)) == ids(without)
    assert find(pool, 10) is with_content[0]


def test_content_outlives_its_user_and_ends_when_the_block_is_handed_out() -> None:
    pool = BlockPool(2)
    [block] = fill(pool, 10)
    pool.free([block])
    assert (pool.num_used, pool.num_cached, pool.num_available) == (0, 1, 1)
    assert find(pool, 10) is block
    pool.allocate(1)
    assert find(pool, 10) is None
    assert (pool.num_used, pool.num_cached, pool.num_available) == (1, 0, 0)


def test_hit_saves_a_free_block_from_eviction() -> None:
    pool = BlockPool(3)
    first, second = fill(pool, 10, 11)
    pool.free([first, second])
    pool.touch([first])
    assert (pool.num_used, pool.num_cached) == (1, 1)
    assert ids(pool.allocate(1)) == ids([second])
    assert find(pool, 10) is first


def test_shared_block_is_free_after_its_last_user() -> None:
    pool = BlockPool(2)
    [block] = fill(pool, 10)
    pool.touch([block])
    pool.free([block])
    assert pool.num_available == 0
    pool.free([block])
    assert pool.num_available == 1


def test_block_freed_again_goes_behind_those_freed_meanwhile() -> None:
    pool = BlockPool(3)
    first, second = fill(pool, 10, 11)
    pool.free([first, second])
    pool.touch([first])
    pool.free([first])
    assert ids(pool.allocate(2)) == ids([second, first])


def test_freeing_more_often_than_taking_is_a_violation() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(InvariantViolation, match="block 1"):
        pool.free(blocks)


def test_equal_contents_are_not_merged_and_stand_in_for_each_other() -> None:
    pool = BlockPool(3)
    first, second = fill(pool, 10, 10)
    assert first is not second
    pool.free([first])
    pool.allocate(1)
    assert find(pool, 10) is second


def test_first_content_of_a_used_block_stays() -> None:
    pool = BlockPool(2)
    [block] = fill(pool, 10)
    pool.register(block, b"hash-11", [11])
    assert find(pool, 10) is block
    assert find(pool, 11) is None


def test_equal_hash_on_other_tokens_is_a_counted_miss() -> None:
    pool = BlockPool(2)
    fill(pool, 10)
    assert pool.find(b"hash-10", [99]) is None
    assert pool.num_collisions == 1
    assert find(pool, 10) is not None
    assert pool.num_collisions == 1


def test_without_verification_the_hash_alone_decides() -> None:
    pool = BlockPool(2, verify_hits=False)
    [block] = fill(pool, 10)
    assert pool.find(b"hash-10", [99]) is block


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(2, enable_caching=False)
    [block] = fill(pool, 10)
    assert find(pool, 10) is None
    pool.free([block])
    assert pool.num_cached == 0


def test_reset_is_refused_while_a_block_is_used() -> None:
    pool = BlockPool(3)
    used, unused = fill(pool, 10, 11)
    pool.free([unused])
    assert not pool.reset_prefix_cache()
    assert find(pool, 11) is unused
    pool.free([used])
    assert pool.reset_prefix_cache()
    assert find(pool, 10) is None
    assert (pool.num_cached, pool.num_available) == (0, 2)
    assert pool.check_integrity() == []


@pytest.mark.regression("free list stays ordered after long runs")
def test_free_list_stays_in_order_over_a_long_run() -> None:
    """Many hits in the middle of the list must not shuffle it (a plain list is the reference)."""
    pool = BlockPool(33)
    blocks = fill(pool, *range(32))
    pool.free(blocks)
    order = list(blocks)
    choice = random.Random(7)
    for _ in range(5000):
        hits = choice.sample(blocks, choice.randint(1, 5))
        pool.touch(hits)
        pool.free(hits)
        order = [block for block in order if block not in hits] + hits
    assert ids(pool.allocate(32)) == ids(order)


def corrupt_ref_count(pool: BlockPool) -> None:
    pool.blocks[1].ref_count += 1


def corrupt_hash(pool: BlockPool) -> None:
    pool.blocks[1].block_hash = b"never registered"


def lose_content(pool: BlockPool) -> None:
    pool.blocks[2].block_hash = None


def use_null_block(pool: BlockPool) -> None:
    pool.free([pool.null_block])


def cut_free_list(pool: BlockPool) -> None:
    next_free = pool.blocks[1].next_free
    assert next_free is not None
    pool.blocks[1].next_free = next_free.next_free


@pytest.mark.parametrize("corrupt", [corrupt_ref_count, corrupt_hash, lose_content, use_null_block, cut_free_list])
def test_self_check_sees_damage(corrupt: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(5)
    taken = pool.allocate(1)
    cached = fill(pool, 10)
    pool.free(taken)
    pool.free(cached)
    assert pool.check_integrity() == []
    corrupt(pool)
    assert pool.check_integrity() != []
