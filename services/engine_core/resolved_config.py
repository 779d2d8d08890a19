"""What the engine found out at start: limits and facts, in a new object. Settings are never assigned back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine_core.config import EngineSettings
from engine_core.kv_cache.kv_cache_layout import KVCacheLayout
from engine_core.model_executor.executor import ModelInfo
from engine_core.model_executor.startup_error import StartupError
from engine_core.scheduler.client_classes import ClientClasses
from engine_core.scheduler.pooling import DEFAULT_POOLING, EMBED, GENERATE, ModelPooling, PoolingType
from engine_core.scheduler.scheduler_config import SchedulerConfig
from engine_core.scheduler.scheduling_policy import SchedulingPolicy


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Identity of what is served; frontends compare it between engines."""

    name: str
    revision: str
    tokenizer_sha256: str
    # Of the weights in force: named by their content, or by the update that brought them.
    weight_version: str = ""
    # Where the weights lie.
    directory: Path = Path()
    # As its files say.
    pooling: ModelPooling = DEFAULT_POOLING


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Everything Ready reports, and everything the scheduler is built from."""

    served_model: ServedModel
    model_info: ModelInfo
    max_model_len: int
    block_size: int
    # With the null block.
    num_blocks: int
    kv_cache_layout: KVCacheLayout
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    # -1 = the whole vocabulary
    max_logprobs: int
    long_prefill_token_threshold: int
    prefill_tokens_beside_decodes: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    verify_prefix_hits: bool
    watermark: float
    reserve_full_prompt: bool
    max_num_partial_prefills: int
    scheduling_policy: SchedulingPolicy
    client_classes: ClientClasses
    seed_of_hashes: str
    # Kinds of constraints that requests may have; none without a vocabulary.
    structured_output_kinds: tuple[str, ...] = ()
    # How the model pools; None = it does not.
    pooling: ModelPooling | None = None
    # Paths in utility calls lie below one of these.
    trusted_dirs: tuple[Path, ...] = ()

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the cache holds in sequences of full length; with sliding windows more than it has slots."""
        layout = self.kv_cache_layout
        num_slots = layout.num_blocks_for(self.max_model_len) * self.block_size
        return (self.num_blocks - 1) * num_slots // layout.most_blocks(self.max_model_len)

    @property
    def features(self) -> tuple[str, ...]:
        """What Ready tells beside the facts with fields of their own."""
        policy = ("priority",) if self.scheduling_policy is SchedulingPolicy.PRIORITY else ()
        pooling = (self.pooling.feature,) if self.pooling is not None else ()
        return (*policy, *pooling, f"model_impl:{self.model_info.implementation}")

    @property
    def embedding_dimensions(self) -> int:
        """0 = this engine does not pool."""
        return self.model_info.hidden_size if self.pooling is not None else 0

    @property
    def tasks(self) -> tuple[str, ...]:
        """What requests may want."""
        return (GENERATE,) if self.pooling is None else (GENERATE, EMBED)

    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            prefill_tokens_beside_decodes=self.prefill_tokens_beside_decodes,
            enable_chunked_prefill=self.enable_chunked_prefill,
            watermark=self.watermark,
            reserve_full_prompt=self.reserve_full_prompt,
            max_num_partial_prefills=self.max_num_partial_prefills,
            scheduling_policy=self.scheduling_policy,
            client_classes=self.client_classes,
        )


def resolve_config(
    settings: EngineSettings,
    served_model: ServedModel,
    model_info: ModelInfo,
    num_blocks: int,
    structured_output_kinds: tuple[str, ...] = (),
) -> ResolvedConfig:
    """Combine what was asked with what was found. Raises StartupError when they do not go together."""
    layout = KVCacheLayout(settings.block_size, model_info.kv_cache_groups, settings.max_num_batched_tokens)
    capacity = layout.longest_that_fits(num_blocks - 1, model_info.max_position_embeddings)
    max_model_len = _max_model_len(settings, model_info, capacity)
    enable_chunked_prefill = settings.enable_chunked_prefill and model_info.is_causal
    if not enable_chunked_prefill and settings.max_num_batched_tokens < max_model_len:
        reason = "--no-enable-chunked-prefill" if model_info.is_causal else "a model that is not causal"
        raise StartupError(
            f"{reason} needs --max-num-batched-tokens of at least --max-model-len "
            f"({max_model_len}), or a full-length prompt would never be scheduled; it is "
            f"{settings.max_num_batched_tokens}"
        )
    return ResolvedConfig(
        served_model=served_model,
        model_info=model_info,
        max_model_len=max_model_len,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        kv_cache_layout=layout,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        max_logprobs=settings.max_logprobs,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        prefill_tokens_beside_decodes=(
            model_info.prefill_tokens_beside_decodes
            if settings.prefill_tokens_beside_decodes < 0
            else settings.prefill_tokens_beside_decodes
        ),
        enable_chunked_prefill=enable_chunked_prefill,
        enable_prefix_caching=settings.enable_prefix_caching and model_info.is_causal,
        verify_prefix_hits=settings.verify_prefix_hits,
        watermark=settings.watermark,
        reserve_full_prompt=settings.reserve_full_prompt,
        max_num_partial_prefills=settings.max_num_partial_prefills,
        scheduling_policy=SchedulingPolicy(settings.scheduling_policy),
        client_classes=settings.client_classes,
        seed_of_hashes=settings.seed_of_hashes,
        structured_output_kinds=structured_output_kinds,
        pooling=_pooling(settings, served_model.pooling),
        trusted_dirs=settings.trusted_directories,
    )


def _pooling(settings: EngineSettings, own: ModelPooling) -> ModelPooling | None:
    match settings.pooling:
        case "off":
            return None
        case "auto":
            return own
        case name:
            return replace(own, type=PoolingType(name))


def _max_model_len(settings: EngineSettings, model_info: ModelInfo, capacity: int) -> int:
    own = model_info.max_position_embeddings
    if capacity < 1:
        raise StartupError(
            f"the KV cache has fewer blocks than the model has groups of layers ({len(model_info.kv_cache_groups)}); "
            "give it more memory"
        )
    if settings.max_model_len == -1:
        return capacity
    wanted = settings.max_model_len or own
    if wanted > own:
        raise StartupError(f"--max-model-len {wanted} is above the model's own limit of {own} tokens")
    if wanted > capacity:
        raise StartupError(
            f"a context of {wanted} tokens does not fit the KV cache; the largest that fits is {capacity} "
            f"(--max-model-len {capacity} or -1), or give the cache more memory"
        )
    return wanted
