"""Which blocks hold the KV of which request: look-up, allocation, prefix caching and release.

Knows keys, counts and hashes, not requests. Owner: the busy-loop thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from engine_core.kv_cache.block import KVCacheBlock
from engine_core.kv_cache.block_hash import TokenSlice
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.kv_cache_layout import KVCacheLayout
from engine_core.kv_cache.prefix_lookup import NO_HIT, PrefixHit, common_hit_length
from stepwire.errors import InvariantViolation

# Block ids by group of layers; without any, when there are none to tell.
BlockIds = tuple[list[int], ...]
NO_BLOCKS: BlockIds = ()


@dataclass(slots=True)
class _Table:
    """The blocks of one request."""

    # One row for each group, in order of position, all of one length. The null block stands where the window of the
    # group has passed.
    rows: list[list[KVCacheBlock]]
    # Leading blocks that are in the prefix cache, or were when they were given back.
    num_registered: int
    # Leading null blocks of each row.
    num_hidden: list[int]


class KVCacheManager:
    """Block tables of all requests over one BlockPool. Every block belongs to one group of layers at a time."""

    def __init__(
        self, num_blocks: int, layout: KVCacheLayout, *, enable_caching: bool = True, verify_hits: bool = True
    ) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.pool = BlockPool(num_blocks, enable_caching=enable_caching, verify_hits=verify_hits)
        self._windows = [(i, group) for i, group in enumerate(layout.groups) if group.sliding_window is not None]
        self._tables: dict[Hashable, _Table] = {}
        # (step, blocks) in the order of the steps: released blocks that this step may still read or write.
        self._fenced: list[tuple[int, list[KVCacheBlock]]] = []
        self._processed_step = 0

    def set_time(self, now: float) -> None:
        """The time of what happens from now on, for the residency of blocks."""
        if self.pool.residency is not None:
            self.pool.residency.now = now

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether one request of this length fits an otherwise empty cache."""
        return self.layout.most_blocks(num_tokens) <= self.pool.num_total

    def get_computed_blocks(self, block_hashes: Sequence[bytes], token_ids: TokenSlice, num_tokens: int) -> PrefixHit:
        """The longest cached beginning of a request, in full blocks, at most `num_tokens - 1` tokens.

        The last known token is always computed: its logits are what the next token is sampled from.
        """
        if not self.pool.enable_caching:
            return NO_HIT
        found: list[dict[int, KVCacheBlock]] = [{} for _ in self.layout.groups]

        def is_cached(group: int, index: int) -> bool:
            if index in found[group]:
                return True
            start = index * self.block_size
            block = self.pool.find(block_hashes[index], token_ids(start, start + self.block_size), group)
            if block is not None:
                found[group][index] = block
            return block is not None

        limit = min(len(block_hashes), (num_tokens - 1) // self.block_size)
        length = common_hit_length(self.layout, limit, is_cached)
        return PrefixHit(length * self.block_size, tuple(self._hit_rows(found, length))) if length else NO_HIT

    def num_cached_tokens(self, block_hashes: Sequence[bytes], num_tokens: int) -> int:
        """Tokens that `get_computed_blocks` would find, told by hashes alone: compares no tokens and counts nothing."""
        limit = min(len(block_hashes), (num_tokens - 1) // self.block_size)
        pool = self.pool
        return self.block_size * common_hit_length(
            self.layout, limit, lambda group, index: pool.has(block_hashes[index], group)
        )

    def can_allocate(self, num_tokens: int, hit: PrefixHit = NO_HIT, *, num_reserved: int = 0) -> bool:
        """Whether a new request of `num_tokens` fits now, computed step by step, with `num_reserved` blocks left over.

        Cached blocks without a user that the hit takes are not available to anyone else.
        """
        num_new = self.layout.num_blocks_for(num_tokens) - hit.num_tokens // self.block_size
        num_needed = 0
        for index, group in enumerate(self.layout.groups):
            num_revived = self._num_without_user(hit.rows[index : index + 1])
            num_needed += min(num_new + num_revived, self.layout.most_blocks_in(group, num_tokens))
        return num_needed + num_reserved <= self.pool.num_available

    def allocate_slots(
        self,
        key: Hashable,
        num_tokens: int,
        hit: PrefixHit = NO_HIT,
        *,
        num_computed_tokens: int = 0,
        fence_step: int = 0,
    ) -> BlockIds | None:
        """Make room for the first `num_tokens` tokens of a request, of which `num_computed_tokens` are computed.

        `hit` starts a new block table (from `get_computed_blocks`). First the blocks that no token to come sees are
        given back, behind the newest step that may use them. Returns the ids added to the tables, those of the hit
        included; None = does not fit, and nothing else has changed.
        """
        if num_tokens <= 0:
            raise InvariantViolation(f"{key} asked for room for {num_tokens} tokens")
        table = self._tables.get(key)
        if table is None:
            return self._start_table(key, num_tokens, hit)
        if hit.num_tokens:
            raise InvariantViolation(f"{key} has blocks already and can not start from computed ones")
        for index, group in self._windows:
            num_hidden = group.num_hidden_tokens(num_computed_tokens) // self.block_size
            if num_hidden > table.num_hidden[index]:
                self._hide(table, index, num_hidden, fence_step)
        num_new = self.layout.num_blocks_for(num_tokens) - len(table.rows[0])
        if num_new <= 0:
            return NO_BLOCKS
        if num_new * len(table.rows) > self.pool.num_available:
            return None
        return self._extend(table, num_new)

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
        size, num_full = self.block_size, min(num_tokens // self.block_size, len(block_hashes))
        if num_full <= table.num_registered:
            return
        new = range(table.num_registered, num_full)
        contents = [token_ids(index * size, (index + 1) * size) for index in new]
        for group, row in enumerate(table.rows):
            for index, content in zip(new, contents, strict=True):
                # A window may pass before the last token of a block is known.
                if row[index] is not self.pool.null_block:
                    parent = block_hashes[index - 1] if index else None
                    self.pool.register(
                        row[index], block_hashes[index], content, parent, is_salted=is_salted, group=group
                    )
        table.num_registered = num_full

    def block_ids(self, key: Hashable) -> BlockIds:
        """The block tables of a request, 0 where a window has passed; without any when it holds none."""
        table = self._tables.get(key)
        return _ids(table.rows) if table else NO_BLOCKS

    def num_blocks(self, key: Hashable) -> int:
        """Blocks that a request holds."""
        table = self._tables.get(key)
        return sum(map(len, table.rows)) - sum(table.num_hidden) if table else 0

    def free(self, key: Hashable, fence_step: int = 0) -> None:
        """Release a request's blocks; a request without blocks is fine.

        They stay out of the pool until `fence_step`, the newest step that may use them, is processed. From the back,
        all groups side by side, so that its tail is evicted first: beginnings are what other requests share, and a
        hit needs every group.
        """
        table = self._tables.pop(key, None)
        if table is not None:
            tails = (reversed(row[num:]) for row, num in zip(table.rows, table.num_hidden, strict=True))
            columns = zip_longest(*tails)
            self._release([block for column in columns for block in column if block is not None], fence_step)

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
        rows = [row for table in self._tables.values() for row in table.rows]
        for row in (*rows, *(blocks for _, blocks in self._fenced)):
            for block in row:
                users[block.block_id] = users.get(block.block_id, 0) + 1
        found = self.pool.check_integrity()
        for block in self.pool.blocks[1:]:
            num_users = users.get(block.block_id, 0)
            if block.ref_count != num_users:
                found.append(f"block {block.block_id}: ref_count {block.ref_count}, but in {num_users} tables")
            if num_users > 1 and block.block_hash is None:
                found.append(f"block {block.block_id} is shared and not full")
        for key, table in self._tables.items():
            found += self._broken_rows(key, table)
        return found

    def _broken_rows(self, key: Hashable, table: _Table) -> list[str]:
        is_ragged = len({len(row) for row in table.rows}) != 1
        is_torn = any(
            (block is self.pool.null_block) != (index < num_hidden)
            for row, num_hidden in zip(table.rows, table.num_hidden, strict=True)
            for index, block in enumerate(row)
        )
        return [f"{key}: its block tables have holes, or differ in length"] if is_ragged or is_torn else []

    def _hit_rows(self, found: list[dict[int, KVCacheBlock]], length: int) -> Iterable[list[KVCacheBlock]]:
        """The found blocks of each group that a request needs behind the hit."""
        null_block = self.pool.null_block
        for group, blocks in zip(self.layout.groups, found, strict=True):
            num_hidden = group.num_hidden_tokens(length * self.block_size) // self.block_size
            yield [null_block] * num_hidden + [blocks[index] for index in range(num_hidden, length)]

    def _start_table(self, key: Hashable, num_tokens: int, hit: PrefixHit) -> BlockIds | None:
        num_groups, num_hit = len(self.layout.groups), hit.num_tokens // self.block_size
        num_new = max(0, self.layout.num_blocks_for(num_tokens) - num_hit)
        if num_new * num_groups > self.pool.num_available - self._num_without_user(hit.rows):
            return None
        rows = [list(row) for row in hit.rows] or [[] for _ in range(num_groups)]
        num_hidden = [sum(block is self.pool.null_block for block in row) for row in rows]
        for row, num in zip(rows, num_hidden, strict=True):
            self.pool.touch(row[num:])
        table = self._tables[key] = _Table(rows, num_hit, num_hidden)
        self._extend(table, num_new)
        return _ids(rows)

    def _extend(self, table: _Table, num_new: int) -> BlockIds:
        added = [self.pool.allocate(num_new) for _ in table.rows]
        for row, blocks in zip(table.rows, added, strict=True):
            row.extend(blocks)
        return _ids(added)

    def _hide(self, table: _Table, index: int, num_hidden: int, fence_step: int) -> None:
        """Give back what the window of one group has passed; what is in it can be hit until it is handed out again."""
        row, start = table.rows[index], table.num_hidden[index]
        hidden = row[start:num_hidden]
        row[start:num_hidden] = [self.pool.null_block] * len(hidden)
        table.num_hidden[index] = num_hidden
        self._release(hidden[::-1], fence_step)

    def _release(self, blocks: list[KVCacheBlock], fence_step: int) -> None:
        if fence_step <= self._processed_step:
            self.pool.free(blocks)
        elif blocks:
            self._fenced.append((fence_step, blocks))

    def _num_without_user(self, rows: Iterable[list[KVCacheBlock]]) -> int:
        """Cached blocks that a hit takes out of the free list; the null block always has a user."""
        return sum(block.ref_count == 0 for row in rows for block in row)


def _ids(rows: Iterable[list[KVCacheBlock]]) -> BlockIds:
    return tuple([block.block_id for block in row] for row in rows)
