"""Rebuilds what the prefix cache holds from its events alone, as a prefix-aware router would, and checks them."""

from __future__ import annotations

from collections.abc import Iterable

from engine_core.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2 as pb

# Hash of the block before, own tokens, whether a salt took part.
Content = tuple[bytes | None, list[int], bool]


class KVEventListener:
    """The contents by group of layers and hash. Nothing may be stored twice, and nothing removed that is not there."""

    def __init__(self) -> None:
        self.contents: dict[tuple[int, bytes], Content] = {}

    def apply(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    key = event.group, event.block_hash
                    assert key not in self.contents
                    self.contents[key] = (event.parent_hash, event.token_ids, event.is_salted)
                case BlockRemoved():
                    del self.contents[event.group, event.block_hash]
                case AllBlocksCleared():
                    self.contents.clear()

    def read(self, response: pb.SubscribeKvEventsResponse) -> None:
        for event in response.events:
            self.apply(_decode(event))


def _decode(event: pb.KvEvent) -> list[KVEvent]:
    match event.WhichOneof("event"):
        case "stored":
            return list(_decode_chain(event.stored))
        case "removed":
            return [BlockRemoved(block_hash, event.removed.group) for block_hash in event.removed.block_hashes]
        case "cleared":
            return [AllBlocksCleared()]
    raise AssertionError("an empty event")


def _decode_chain(stored: pb.KvEvent.BlockStored) -> Iterable[BlockStored]:
    tokens, size = token_array.unpack(stored.token_ids), stored.block_size
    assert len(tokens) == (0 if stored.salted else size * len(stored.block_hashes))
    parents = [stored.parent_block_hash or None, *stored.block_hashes]
    for index, block_hash in enumerate(stored.block_hashes):
        own = tokens[index * size : (index + 1) * size]
        yield BlockStored(block_hash, parents[index], own, stored.salted, stored.group)
