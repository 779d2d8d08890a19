"""One KV block's bookkeeping, and the free list that is also the eviction order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stepwire.errors import InvariantViolation


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """`block_size` KV slots. In the free list exactly when `ref_count` is 0 (the null block is never in it).

    `block_hash` is set while the content is full and can be found in the prefix cache, also while the block is free.
    """

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None
    # Of layers: whose content `block_hash` stands for.
    group: int = 0
    # The tokens behind `block_hash`, so that a hit can be verified.
    token_ids: list[int] | None = None
    prev_free: KVCacheBlock | None = None
    next_free: KVCacheBlock | None = None


class FreeBlockQueue:
    """Doubly linked list with fake ends: O(1) pop, append and removal in the middle.

    The front is handed out next. A deque cannot remove from the middle, which every prefix hit does.
    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-2)
        self._link(self._head, self._tail)
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def popleft(self) -> KVCacheBlock:
        """Take the front block; the caller has checked that there is one."""
        block = self._head.next_free
        if block is None or block is self._tail:
            raise InvariantViolation("the free list is empty")
        self.remove(block)
        return block

    def append(self, block: KVCacheBlock) -> None:
        """To the back: evicted last."""
        self._insert_between(self._tail.prev_free, block, self._tail)

    def appendleft(self, block: KVCacheBlock) -> None:
        """To the front: handed out next, for blocks without content worth keeping."""
        self._insert_between(self._head, block, self._head.next_free)

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of the middle: it was hit."""
        prev_free, next_free = block.prev_free, block.next_free
        if prev_free is None or next_free is None:
            raise InvariantViolation(f"block {block.block_id} is not in the free list")
        self._link(prev_free, next_free)
        block.prev_free = block.next_free = None
        self._length -= 1

    def _insert_between(
        self, prev_free: KVCacheBlock | None, block: KVCacheBlock, next_free: KVCacheBlock | None
    ) -> None:
        if block.next_free is not None or prev_free is None or next_free is None:
            raise InvariantViolation(f"block {block.block_id} is in the free list already")
        self._link(prev_free, block)
        self._link(block, next_free)
        self._length += 1

    @staticmethod
    def _link(left: KVCacheBlock, right: KVCacheBlock) -> None:
        left.next_free = right
        right.prev_free = left
