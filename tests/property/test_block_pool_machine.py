"""FreeBlockQueue and KVCacheManager (with its BlockPool) against models made of plain lists and dicts.

The models know nothing of links, counters or hashes: order is a list, content is the whole token prefix with its salt.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.kv_cache.block import FreeBlockQueue, KVCacheBlock
from engine_core.kv_cache.block_hash import BlockHasher
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from fakes.kv_event_listener import KVEventListener
from fakes.request_factory import make_layout

# A content is (salt, all tokens up to the end of the block).
Content = tuple[str, tuple[int, ...]]


class FreeBlockQueueMachine(RuleBasedStateMachine):
    """The queue must be a list with fast removal."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [KVCacheBlock(block_id) for block_id in range(6)]
        self.queue = FreeBlockQueue(self.blocks)
        self.model = list(self.blocks)

    def _outside(self) -> list[KVCacheBlock]:
        return [block for block in self.blocks if block not in self.model]

    @precondition(lambda self: self.model)
    @rule()
    def popleft(self) -> None:
        assert self.queue.popleft() is self.model.pop(0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block = self.model.pop(data.draw(st.integers(0, len(self.model) - 1)))
        self.queue.remove(block)

    @precondition(lambda self: self._outside())
    @rule(data=st.data(), to_front=st.booleans())
    def put_back(self, data: st.DataObject, to_front: bool) -> None:
        block = data.draw(st.sampled_from(self._outside()))
        if to_front:
            self.queue.appendleft(block)
            self.model.insert(0, block)
        else:
            self.queue.append(block)
            self.model.append(block)

    @invariant()
    def same_order(self) -> None:
        assert list(self.queue) == self.model
        assert len(self.queue) == len(self.model)


@dataclass
class Sequence:
    """A user of the cache: its known tokens, and how many of them are computed."""

    salt: str
    token_ids: list[int]
    hashes: list[bytes]
    num_computed_tokens: int

    def slice(self, start: int, end: int) -> list[int]:
        return self.token_ids[start:end]


class KVCacheMachine(RuleBasedStateMachine):
    """Block tables, content and eviction order, from hit to reset."""

    @initialize(
        num_blocks=st.sampled_from([2, 4, 5, 6, 8, 10]),
        block_size=st.integers(1, 3),
        enable_caching=st.sampled_from([True, True, True, False]),
        verify_hits=st.booleans(),
    )
    def start(self, num_blocks: int, block_size: int, enable_caching: bool, verify_hits: bool) -> None:
        self.size = block_size
        self.enable_caching = enable_caching
        self.verify_hits = verify_hits
        self.manager = KVCacheManager(
            num_blocks, make_layout(block_size), enable_caching=enable_caching, verify_hits=verify_hits
        )
        self.manager.pool.collect_events()
        self.listener = KVEventListener()
        self.hasher = BlockHasher(block_size, "seed")
        self.num_started = 0
        self.num_collisions = 0
        self.num_evictions = 0
        self.sequences: dict[int, Sequence] = {}
        # The model: what is where. `free` is in the order of eviction.
        self.tables: dict[int, list[int]] = {}
        self.contents: dict[int, Content] = {}
        self.free = list(range(1, num_blocks))

    # -- model -------------------------------------------------------------------------------------------------------

    def _content(self, sequence: Sequence, index: int) -> Content:
        return sequence.salt, tuple(sequence.token_ids[: (index + 1) * self.size])

    def _num_hit_blocks(self, sequence: Sequence) -> int:
        cached = set(self.contents.values())
        num_hits = 0
        # The last known token is always computed.
        while (num_hits + 1) * self.size <= len(sequence.token_ids) - 1 and self._content(sequence, num_hits) in cached:
            num_hits += 1
        return num_hits

    def _is_used(self, block_id: int) -> bool:
        return any(block_id in table for table in self.tables.values())

    def _take_from_free(self, num_blocks: int) -> list[int]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        for block_id in taken:
            if self.contents.pop(block_id, None) is not None:
                self.num_evictions += 1
        return taken

    # -- rules -------------------------------------------------------------------------------------------------------

    def _new_sequence(self, token_ids: list[int], salt: str) -> Sequence:
        sequence = Sequence(salt, token_ids, [], 0)
        self.hasher.extend(sequence.hashes, len(token_ids), sequence.slice, salt)
        return sequence

    # Two token values and few lengths: equal prefixes come up all the time.
    @rule(
        token_ids=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=9),
        salt=st.sampled_from(["", "", "", "a"]),
        life=st.sampled_from(["waits", "is computed", "is over"]),
    )
    def admit(self, token_ids: list[int], salt: str, life: str) -> None:
        sequence = self._new_sequence(token_ids, salt)
        hit = self.manager.get_computed_blocks(sequence.hashes, sequence.slice, len(token_ids))
        hits = [block for row in hit.rows for block in row]
        assert hit.num_tokens == len(hits) * self.size
        assert len(hits) == self._num_hit_blocks(sequence)
        hit_ids = [block.block_id for block in hits]
        for index, block_id in enumerate(hit_ids):
            assert self.contents[block_id] == self._content(sequence, index)
        num_new = -(-len(token_ids) // self.size) - len(hits)
        fits = num_new <= len([block_id for block_id in self.free if block_id not in hit_ids])
        assert self.manager.can_allocate(len(token_ids), hit) == fits
        added = self.manager.allocate_slots(self.num_started, len(token_ids), hit)
        assert (added is not None) == fits
        if added is not None:
            self.free = [block_id for block_id in self.free if block_id not in hit_ids]
            sequence.num_computed_tokens = len(hits) * self.size
            self.tables[self.num_started] = hit_ids + self._take_from_free(num_new)
            assert added == (self.tables[self.num_started],)
            self.sequences[self.num_started] = sequence
            if life != "waits":
                self._compute(self.num_started, len(token_ids))
            if life == "is over":
                self._release(self.num_started)
            self.num_started += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        key = data.draw(st.sampled_from(sorted(self.tables)))
        sequence = self.sequences[key]
        num_tokens = len(sequence.token_ids) + len(more)
        num_new = -(-num_tokens // self.size) - len(self.tables[key])
        added = self.manager.allocate_slots(key, num_tokens)
        assert (added is not None) == (num_new <= len(self.free))
        if added is not None:
            sequence.token_ids.extend(more)
            self.hasher.extend(sequence.hashes, num_tokens, sequence.slice, sequence.salt)
            taken = self._take_from_free(num_new)
            assert added == ((taken,) if taken else ())
            self.tables[key].extend(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.tables)))
        sequence = self.sequences[key]
        self._compute(key, data.draw(st.integers(sequence.num_computed_tokens, len(sequence.token_ids))))

    def _compute(self, key: int, num_computed: int) -> None:
        sequence = self.sequences[key]
        sequence.num_computed_tokens = num_computed
        is_salted = bool(sequence.salt)
        self.manager.register_full_blocks(key, sequence.hashes, sequence.slice, num_computed, is_salted)
        for index in range(num_computed // self.size if self.enable_caching else 0):
            self.contents[self.tables[key][index]] = self._content(sequence, index)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(sorted(self.tables))))

    def _release(self, key: int) -> None:
        self.manager.free(key)
        del self.sequences[key]
        for block_id in reversed(self.tables.pop(key)):
            if self._is_used(block_id):
                continue
            # Nothing worth keeping goes first, content goes last.
            self.free.insert(len(self.free) if block_id in self.contents else 0, block_id)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def look_up_with_forged_hash(self, data: st.DataObject) -> None:
        """The right hash on other tokens, as if SHA-256 had collided: a miss, unless hits are not verified."""
        block_id = data.draw(st.sampled_from(sorted(self.contents)))
        salt, prefix = self.contents[block_id]
        honest = self._new_sequence([*prefix, 0], salt)
        forged = Sequence(salt, [*prefix[:-1], 7, 0], honest.hashes, 0)
        num_honest_hits = self._num_found(honest, len(prefix) + 1)
        num_found = self._num_found(forged, len(prefix) + 1)
        is_reached = num_honest_hits == len(prefix) // self.size
        if self.verify_hits and is_reached:
            self.num_collisions += 1
            assert num_found == num_honest_hits - 1
        else:
            assert num_found == num_honest_hits

    @precondition(lambda self: self.contents)
    @rule(is_meant=st.sampled_from([False, False, False, True]))
    def reset(self, is_meant: bool) -> None:
        """Rare, because it ends whatever had become interesting."""
        if not is_meant:
            return
        is_idle = not any(self.tables.values())
        assert self.manager.pool.reset_prefix_cache() == is_idle
        if is_idle:
            self.contents.clear()

    def _num_found(self, sequence: Sequence, num_tokens: int) -> int:
        hit = self.manager.get_computed_blocks(sequence.hashes, sequence.slice, num_tokens)
        return hit.num_tokens // self.size

    # -- invariants --------------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        assert self.manager.check_integrity() == []

    @invariant()
    def same_tables(self) -> None:
        for key, table in self.tables.items():
            assert self.manager.block_ids(key) == (table,)

    @invariant()
    def the_listener_knows_what_can_be_hit(self) -> None:
        """By hash, parent and tokens, which together are the content."""
        self.listener.apply(self.manager.pool.take_events())
        expected: dict[tuple[int, bytes], tuple[bytes | None, list[int], bool]] = {}
        for salt, prefix in self.contents.values():
            hashes = self._new_sequence(list(prefix), salt).hashes
            parent = hashes[-2] if len(hashes) > 1 else None
            expected[0, hashes[-1]] = (parent, list(prefix[-self.size :]), bool(salt))
        assert self.listener.contents == expected

    @invariant()
    def counts_add_up(self) -> None:
        pool = self.manager.pool
        num_free = pool.num_available - pool.num_cached
        assert num_free + pool.num_cached + pool.num_used + 1 == len(pool.blocks)
        assert pool.num_available == len(self.free)
        assert pool.num_cached == len([block_id for block_id in self.free if block_id in self.contents])
        assert all(block.ref_count >= 0 for block in pool.blocks)
        assert pool.num_collisions == self.num_collisions
        assert pool.num_evictions == self.num_evictions

    def teardown(self) -> None:
        """What is left must come out in the model's order of eviction."""
        if not hasattr(self, "manager"):
            return
        if self.free:
            assert self.manager.allocate_slots("last", len(self.free) * self.size) == (self.free,)
        for key in [*self.tables, "last"]:
            self.manager.free(key)
        assert self.manager.pool.num_used == 0
        assert self.manager.check_integrity() == []


TestFreeBlockQueue = FreeBlockQueueMachine.TestCase
TestFreeBlockQueue.settings = settings(stateful_step_count=40)

TestKVCache = KVCacheMachine.TestCase
TestKVCache.settings = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=40)
