"""Which blocks hold the KV of which request: look-up, allocation, prefix caching and release.

Knows keys, counts and hashes, not requests. Owner: the busy-loop thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from engine_core.kv_cache.block import KVCacheBlock
from engine_core.kv_cache.block_hash import TokenSlice
from engine_core.kv_cache.block_pool import BlockPool
from stepwire.errors import InvariantViolation


class KVCacheManager:
    """Block tables of all requests over one BlockPool."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_caching: bool = True, verify_hits: bool = True
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, enable_caching=enable_caching, verify_hits=verify_hits)
        self._tables: dict[Hashable, list[KVCacheBlock]] = {}
        # Leading blocks of each table that are in the prefix cache.
        self._num_registered: dict[Hashable, int] = {}
        # (step, blocks) in the order of the steps: released requests whose blocks that step may still write.
        self._fenced: list[tuple[int, list[KVCacheBlock]]] = []
        self._processed_step = 0

    def set_time(self, now: float) -> None:
        """The time of what happens from now on, for the residency of blocks."""
        if self.pool.residency is not None:
            self.pool.residency.now = now

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether one request of this length fits an otherwise empty cache."""
        return self.num_blocks_for(num_tokens) <= self.pool.num_total

    def get_computed_blocks(
        self, block_hashes: Sequence[bytes], token_ids: TokenSlice, num_tokens: int
    ) -> list[KVCacheBlock]:
        """The longest run of cached full blocks at the start of a request, at most `num_tokens - 1` tokens.

        The last known token is always computed: its logits are what the next token is sampled from.
        """
        found: list[KVCacheBlock] = []
        if not self.pool.enable_caching:
            return found
        for index in range(min(len(block_hashes), (num_tokens - 1) // self.block_size)):
            start = index * self.block_size
            block = self.pool.find(block_hashes[index], token_ids(start, start + self.block_size))
            if block is None:
                break
            found.append(block)
        return found

    def can_allocate(
        self, num_tokens: int, computed_blocks: Sequence[KVCacheBlock] = (), *, num_reserved: int = 0
    ) -> bool:
        """Whether a new request of `num_tokens` fits now, with `num_reserved` blocks left over."""
        num_new = self.num_blocks_for(num_tokens) - len(computed_blocks)
        return num_new + num_reserved <= self.pool.num_available - _num_without_user(computed_blocks)

    def allocate_slots(
        self, key: Hashable, num_tokens: int, computed_blocks: Sequence[KVCacheBlock] = ()
    ) -> list[int] | None:
        """Make room for the first `num_tokens` tokens of a request.

        `computed_blocks` starts a new block table (from `get_computed_blocks`). Returns the ids added to the table,
        those included; None = does not fit, and nothing has changed.
        """
        table = self._tables.get(key, [])
        if num_tokens <= 0:
            raise InvariantViolation(f"{key} asked for room for {num_tokens} tokens")
        if table and computed_blocks:
            raise InvariantViolation(f"{key} has blocks already and can not start from computed ones")
        num_new = self.num_blocks_for(num_tokens) - len(table) - len(computed_blocks)
        if num_new > self.pool.num_available - _num_without_user(computed_blocks):
            return None
        self.pool.touch(computed_blocks)
        added = [*computed_blocks, *self.pool.allocate(max(0, num_new))]
        self._tables.setdefault(key, []).extend(added)
        self._num_registered.setdefault(key, len(computed_blocks))
        return [block.block_id for block in added]

    def register_full_blocks(
        self,
        key: Hashable,
        block_hashes: Sequence[bytes],
        token_ids: TokenSlice,
        num_tokens: int,
        is_salted: bool = False,
    ) -> None:
        """Let other requests hit the blocks that the first `num_tokens` tokens fill.

        Called when those tokens are scheduled: a request admitted later in the same step may share them, because
        every layer writes the whole batch's KV before it attends.
        """
        table = self._tables[key]
        num_full = min(num_tokens // self.block_size, len(block_hashes))
        for index in range(self._num_registered[key], num_full):
            start = index * self.block_size
            self.pool.register(
                table[index],
                block_hashes[index],
                token_ids(start, start + self.block_size),
                block_hashes[index - 1] if index else None,
                is_salted=is_salted,
            )
        self._num_registered[key] = max(self._num_registered[key], num_full)

    def block_ids(self, key: Hashable) -> list[int]:
        """The block table of a request; empty when it holds none."""
        return [block.block_id for block in self._tables.get(key, ())]

    def free(self, key: Hashable, fence_step: int = 0) -> None:
        """Release a request's blocks; a request without blocks is fine.

        They stay out of the pool until `fence_step`, the newest step that may write them, is processed. In reverse, so
        that its tail is evicted first: beginnings are what other requests share.
        """
        self._num_registered.pop(key, None)
        blocks = self._tables.pop(key, [])[::-1]
        if fence_step <= self._processed_step:
            self.pool.free(blocks)
        elif blocks:
            self._fenced.append((fence_step, blocks))

    def release_fenced(self, step: int) -> None:
        """Steps up to `step` are processed: what only they could write goes back to the pool, in order of release."""
        self._processed_step = step
        fenced, self._fenced = self._fenced, []
        for fence_step, blocks in fenced:
            if fence_step <= step:
                self.pool.free(blocks)
            else:
                self._fenced.append((fence_step, blocks))

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks that wait for the steps in flight."""
        return len({block.block_id for _, blocks in self._fenced for block in blocks})

    def check_integrity(self) -> list[str]:
        """Broken invariants of pool and tables in words; empty = sound."""
        users: dict[int, int] = {}
        for table in (*self._tables.values(), *(blocks for _, blocks in self._fenced)):
            for block in table:
                users[block.block_id] = users.get(block.block_id, 0) + 1
        found = self.pool.check_integrity()
        for block in self.pool.blocks[1:]:
            num_users = users.get(block.block_id, 0)
            if block.ref_count != num_users:
                found.append(f"block {block.block_id}: ref_count {block.ref_count}, but in {num_users} tables")
            if num_users > 1 and block.block_hash is None:
                found.append(f"block {block.block_id} is shared and not full")
        return found


def _num_without_user(blocks: Sequence[KVCacheBlock]) -> int:
    """Cached blocks that a hit takes out of the free list: they are not available to anyone else."""
    return sum(block.ref_count == 0 for block in blocks)
