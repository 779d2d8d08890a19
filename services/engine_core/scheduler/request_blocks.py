"""The KV blocks of requests: between the scheduler, which knows requests, and the KV cache, which knows keys."""

from __future__ import annotations

from engine_core.kv_cache.block_hash import BlockHasher
from engine_core.kv_cache.kv_cache_manager import BlockIds, KVCacheManager
from engine_core.kv_cache.prefix_lookup import NO_HIT, PrefixHit
from engine_core.scheduler.request import Request


class RequestBlocks:
    """Asks the KV cache on behalf of a request. `watermark`: the share of blocks an admission leaves to others."""

    def __init__(self, kv_cache_manager: KVCacheManager, block_hasher: BlockHasher, watermark: float) -> None:
        self._manager = kv_cache_manager
        self._block_hasher = block_hasher
        self._num_watermark_blocks = int(watermark * kv_cache_manager.pool.num_total)

    def extend_hashes(self, request: Request) -> None:
        """Hash the blocks that the request's known tokens have filled."""
        if self._manager.pool.enable_caching:
            self._block_hasher.extend(request.block_hashes, request.num_tokens, request.token_ids, request.cache_salt)

    def computed(self, request: Request) -> PrefixHit:
        """What a request without blocks can start from."""
        if request.bypass_prefix_cache or request.needs_whole_prompt:
            return NO_HIT
        return self._manager.get_computed_blocks(request.block_hashes, request.token_ids, request.num_tokens)

    def fits_now(self, request: Request, hit: PrefixHit, *, next_to_others: bool) -> bool:
        """The whole known sequence fits the free blocks, not only its first chunk: else chunks would thrash."""
        num_reserved = self._num_watermark_blocks if next_to_others else 0
        return self._manager.can_allocate(request.num_tokens, hit, num_reserved=num_reserved)

    def extend(self, request: Request, num_tokens: int) -> BlockIds | None:
        """Room for the first `num_tokens` tokens of a running request; None = there is not enough."""
        return self._manager.allocate_slots(
            request.key,
            num_tokens,
            num_computed_tokens=request.num_computed_tokens,
            fence_step=request.last_step,
        )

    def register(self, request: Request) -> None:
        """Other requests may hit the blocks that the request's computed and known tokens fill."""
        self._manager.register_full_blocks(
            request.key, request.block_hashes, request.token_ids, request.num_computed_tokens, bool(request.cache_salt)
        )

    def free(self, request: Request) -> None:
        """Give all blocks back, as soon as no step in flight uses them any more."""
        self._manager.free(request.key, fence_step=request.last_step)
