"""Changes of the prefix cache as vLLM's protocol tells them. Pure, but for the state of one stream.

That protocol has 64 bits for a hash, of which ours gives the first. What was stored under a salt is left out: nobody
may learn its tokens, and without them a reader can match nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from smg_grpc_proto.generated import common_pb2

from frontend.engine_client.kv_events import AllCleared, BlocksRemoved, BlocksStored, KvChange, KvChanges

_HASH_BYTES = 8


class KvBatches:
    """`take` what the engine tells, in order. A snapshot, which comes first if at all, is held until it is complete."""

    def __init__(self) -> None:
        self._parts: list[KvChanges] = []
        self._is_first = True

    @property
    def num_tokens(self) -> int:
        """Of the parts that are held."""
        return sum(part.num_tokens for part in self._parts)

    def take(self, news: KvChanges) -> list[Any]:
        """What can be told now."""
        self._parts.append(news)
        if not news.sequence:
            return []
        parts, self._parts = self._parts, []
        is_first, self._is_first = self._is_first, False
        is_snapshot = len(parts) > 1 or (is_first and bool(news.changes) and isinstance(news.changes[0], AllCleared))
        return list(_snapshot(parts)) if is_snapshot else [_batch(news.sequence, news)]


def _snapshot(parts: Sequence[KvChanges]) -> Iterator[Any]:
    num_blocks = sum(_num_blocks(part.changes) for part in parts)
    for index, part in enumerate(parts):
        # The last one has the number of the state.
        batch = _batch(parts[-1].sequence - len(parts) + 1 + index, part)
        batch.snapshot.CopyFrom(common_pb2.KvSnapshotChunk(index=index, count=len(parts), blocks=num_blocks))
        yield batch


def _batch(sequence: int, news: KvChanges) -> Any:
    return common_pb2.KvEventBatch(
        sequence_number=sequence,
        timestamp=time.time(),
        events=[event for change in news.changes for event in _events(change)],
        dp_rank=news.rank,
    )


def _events(change: KvChange) -> Iterator[Any]:
    match change:
        case BlocksStored() if not change.is_salted:
            yield common_pb2.KvCacheEvent(stored=_stored(change))
        case BlocksRemoved():
            removed = common_pb2.KvBlocksRemoved(
                block_hashes=map(_short, change.block_hashes),
                group_idx=change.group,
                tier=common_pb2.KV_CACHE_TIER_DEVICE,
            )
            yield common_pb2.KvCacheEvent(removed=removed)
        case AllCleared():
            yield common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())


def _stored(change: BlocksStored) -> Any:
    size = change.block_size
    blocks = [
        common_pb2.KvBlock(
            block_hash=_short(block_hash),
            token_ids=change.token_ids[index * size : (index + 1) * size],
            block_size=size,
        )
        for index, block_hash in enumerate(change.block_hashes)
    ]
    return common_pb2.KvBlocksStored(
        blocks=blocks,
        parent_block_hash=_short(change.parent_hash) if change.parent_hash else None,
        tier=common_pb2.KV_CACHE_TIER_DEVICE,
        group_idx=change.group,
    )


def _num_blocks(changes: Sequence[KvChange]) -> int:
    return sum(len(one.block_hashes) for one in changes if isinstance(one, BlocksStored) and not one.is_salted)


def _short(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:_HASH_BYTES], "big", signed=True)
