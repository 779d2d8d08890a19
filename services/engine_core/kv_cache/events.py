"""What changes in the prefix cache, as values: a hash enters it, a hash leaves it, it is emptied.

By hash and not by block: of several blocks with equal content only the first is stored and only the last is removed, so
that whoever replays the events holds exactly the set of hashes that can be hit. Salts are not in here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """From now on this content can be hit."""

    block_hash: bytes
    # None = the first block of a prompt.
    parent_hash: bytes | None
    # Of this block; never changed once it is in here.
    token_ids: list[int]
    # Whether a cache salt took part in the hash.
    is_salted: bool
    # The same tokens have other content in every group of layers.
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The last block with this content was handed out again."""

    block_hash: bytes
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be hit any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
