"""All KV blocks of the engine: which are free, which are used, and which hold content that can be found by hash.

free (no content) + cached (content, no user) + used (reference count > 0) + the null block = total, at all times.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_core.kv_cache.block import FreeBlockQueue, KVCacheBlock
from engine_core.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from engine_core.kv_cache.residency import BlockResidency
from stepwire.errors import InvariantViolation


class BlockPool:
    """Hands out blocks, least recently freed first, and keeps the content of free ones until it must go."""

    def __init__(self, num_blocks: int, *, enable_caching: bool = True, verify_hits: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; at least 2 are needed: the null block and one for data")
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        # Block 0 stands for "no block" in padded block tables; it never holds data.
        self.null_block = self.blocks[0]
        self.null_block.ref_count = 1
        self.enable_caching = enable_caching
        self.num_collisions = 0
        self.num_evictions = 0
        # None = residency is not measured.
        self.residency: BlockResidency | None = None
        # None = nobody wants to know.
        self._events: list[KVEvent] | None = None
        self._verify_hits = verify_hits
        self._free = FreeBlockQueue(self.blocks[1:])
        self._num_cached_free = 0
        # Blocks with equal content are not merged: their owners hold block tables that would have to change.
        # The same tokens have other content in every group of layers.
        self._by_hash: dict[tuple[int, bytes], dict[int, KVCacheBlock]] = {}

    @property
    def num_total(self) -> int:
        """Blocks that can hold data."""
        return len(self.blocks) - 1

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free or cached."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without a user whose content can still be hit."""
        return self._num_cached_free

    @property
    def num_used(self) -> int:
        return self.num_total - len(self._free)

    def find(self, block_hash: bytes, token_ids: list[int], group: int = 0) -> KVCacheBlock | None:
        """A block with this content, or None. A hash whose stored tokens differ is a miss, and counted."""
        candidates = self._by_hash.get((group, block_hash))
        if not candidates:
            return None
        block = next(iter(candidates.values()))
        if self._verify_hits and block.token_ids != token_ids:
            self.num_collisions += 1
            return None
        return block

    def has(self, block_hash: bytes, group: int = 0) -> bool:
        """Whether there is a block of this hash."""
        return (group, block_hash) in self._by_hash

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more user for each block; a free one leaves the free list."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
                self._num_cached_free -= block.block_hash is not None
            block.ref_count += 1
            if self.residency is not None:
                self.residency.hit(block.block_id)

    def allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks with one user each; the caller has checked `num_available`. Their old content is forgotten."""
        taken = [self._free.popleft() for _ in range(num_blocks)]
        for block in taken:
            if block.block_hash is not None:
                self._evict(block)
            block.ref_count = 1
            if self.residency is not None:
                self.residency.allocated(block.block_id)
        return taken

    def register(
        self,
        block: KVCacheBlock,
        block_hash: bytes,
        token_ids: list[int],
        parent_hash: bytes | None = None,
        *,
        is_salted: bool = False,
        group: int = 0,
    ) -> None:
        """The content of a used block is full: from now on it can be hit."""
        if not self.enable_caching or block.block_hash is not None:
            return
        block.block_hash, block.group = block_hash, group
        block.token_ids = token_ids
        same_hash = self._by_hash.setdefault((group, block_hash), {})
        if self._events is not None and not same_hash:
            self._events.append(BlockStored(block_hash, parent_hash, token_ids, is_salted, group))
        same_hash[block.block_id] = block

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One user less for each block, in order; the first one is evicted first."""
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.ref_count < 0:
                raise InvariantViolation(f"block {block.block_id} was freed more often than taken")
            if block.block_hash is None:
                self._free.appendleft(block)
            else:
                self._free.append(block)
                self._num_cached_free += 1

    def reset_prefix_cache(self) -> bool:
        """Forget all content. False, and nothing changed, while any block has a user."""
        if self.num_used:
            return False
        for block in self.blocks:
            block.block_hash = block.token_ids = None
        self._by_hash.clear()
        self._num_cached_free = 0
        if self._events is not None:
            self._events.append(AllBlocksCleared())
        return True

    def collect_events(self) -> None:
        """From now on note what changes; the caller takes it regularly."""
        self._events = []

    def take_events(self) -> list[KVEvent]:
        """What has changed since the last call, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> list[str]:
        """Broken invariants in words; empty = sound. Walks all blocks: for idle moments, tests and DumpState."""
        free_ids = [block.block_id for block in self._free]
        found: list[str] = []
        if len(free_ids) != len(set(free_ids)) or len(free_ids) != len(self._free):
            found.append("a block stands in the free list twice, or its length is wrong")
        in_free_list = set(free_ids)
        for block in self.blocks[1:]:
            if (block.ref_count == 0) != (block.block_id in in_free_list) or block.ref_count < 0:
                found.append(f"block {block.block_id}: ref_count {block.ref_count} disagrees with the free list")
            hashed = block.block_hash is not None and block.block_id in self._by_hash.get(
                (block.group, block.block_hash), {}
            )
            if hashed != (block.block_hash is not None):
                found.append(f"block {block.block_id} has a hash that the prefix cache does not know")
        if self._num_cached_free != sum(self.blocks[block_id].block_hash is not None for block_id in free_ids):
            found.append("the number of cached blocks is wrong")
        if sum(map(len, self._by_hash.values())) != sum(block.block_hash is not None for block in self.blocks):
            found.append("the prefix cache holds blocks without a hash")
        if self.null_block.ref_count != 1 or 0 in in_free_list or self.null_block.block_hash is not None:
            found.append("the null block was used")
        return found

    def _evict(self, block: KVCacheBlock) -> None:
        if block.block_hash is None:
            raise InvariantViolation(f"block {block.block_id} has no content to forget")
        self._num_cached_free -= 1
        self.num_evictions += 1
        key = block.group, block.block_hash
        same_hash = self._by_hash[key]
        del same_hash[block.block_id]
        if not same_hash:
            del self._by_hash[key]
            if self._events is not None:
                self._events.append(BlockRemoved(block.block_hash, block.group))
        block.block_hash = block.token_ids = None
        if self.residency is not None:
            self.residency.evicted(block.block_id)
