"""The KV blocks of requests: between the scheduler, which knows requests, and the KV cache, which knows keys."""

from __future__ import annotations

from engine_core.kv_cache.block_hash import BlockHasher
from engine_core.kv_cache.kv_cache_manager import BlockIds, KVCacheManager
from engine_core.kv_cache.prefix_lookup import NO_HIT, PrefixHit
from engine_core.scheduler.request import Request
from engine_core.scheduler.scheduler_config import SchedulerConfig


class RequestBlocks:
    """Asks the KV cache on behalf of a request."""

    def __init__(self, kv_cache_manager: KVCacheManager, block_hasher: BlockHasher, config: SchedulerConfig) -> None:
        self._manager = kv_cache_manager
        self._block_hasher = block_hasher
        self._is_caching = kv_cache_manager.pool.enable_caching
        self._reserve_full_prompt = config.reserve_full_prompt
        self._num_watermark_blocks = int(config.watermark * kv_cache_manager.pool.num_total)

    def extend_hashes(self, request: Request) -> None:
        """Hash the blocks that the request's known tokens have filled."""
        # Most tokens fill no block.
        num_hashed = len(request.block_hashes) * self._manager.block_size
        if self._is_caching and request.num_tokens >= num_hashed + self._manager.block_size:
            self._block_hasher.extend(request.block_hashes, request.num_tokens, request.token_ids, request.cache_salt)

    def enter(self, request: Request) -> None:
        """It is about to be queued: note what of it is cached now, which may be more or less when its turn comes."""
        self.extend_hashes(request)
        if self._may_read(request):
            request.num_cached_at_arrival = self._manager.num_cached_tokens(request.block_hashes, request.num_tokens)

    def computed(self, request: Request) -> PrefixHit:
        """What a request without blocks can start from."""
        if not self._may_read(request):
            return NO_HIT
        return self._manager.get_computed_blocks(request.block_hashes, request.token_ids, request.num_tokens)

    def fits_now(self, request: Request, hit: PrefixHit, num_new_tokens: int, *, next_to_others: bool) -> bool:
        """The whole known sequence fits the free blocks, or only its first chunk where that is asked for.

        Admitted by their first chunks alone, long prompts may preempt each other again and again.
        """
        num_tokens = request.num_tokens if self._reserve_full_prompt else hit.num_tokens + num_new_tokens
        num_reserved = self._num_watermark_blocks if next_to_others else 0
        return self._manager.can_allocate(num_tokens, hit, num_reserved=num_reserved)

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

    def _may_read(self, request: Request) -> bool:
        return not (request.bypass_prefix_cache or request.needs_whole_prompt)
