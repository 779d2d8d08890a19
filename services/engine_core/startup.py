"""From settings to an engine core that is ready to step: model, KV cache, warm-up. Runs on the main thread."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from engine_core.config import EngineSettings
from engine_core.core import EngineCore
from engine_core.kv_cache.residency import BlockResidency
from engine_core.model_executor.executor import Executor, FailureCallback
from engine_core.resolved_config import ServedModel, resolve_config
from engine_core.scheduler.grammar import GRAMMAR_KINDS
from engine_core.step_costs import StepCosts
from engine_core.structured_output.vocabulary import Vocabulary

if TYPE_CHECKING:
    from engine_core.structured_output.manager import StructuredOutputManager

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
STARTUP_PHASES = ("load", "profile", "allocate", "warm_up")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An executor that holds the model, and what the model is."""

    executor: Executor
    served_model: ServedModel
    tokenizer_archive: bytes
    # None = the bytes of its tokens are not known: no structured output.
    vocabulary: Vocabulary | None = None


class ModelLoader(Protocol):
    """Finds and loads the model; tests put a fake one here. Raises StartupError for the operator."""

    def __call__(
        self, settings: EngineSettings, failure_callback: FailureCallback, progress: Progress
    ) -> LoadedModel: ...


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """What the start-up made."""

    core: EngineCore
    tokenizer_archive: bytes
    # Seconds by phase: STARTUP_PHASES.
    times: dict[str, float]


def start_engine(
    settings: EngineSettings,
    load_model: ModelLoader,
    failure_callback: FailureCallback,
    on_loaded: Callable[[], None],
    clock: Callable[[], float],
) -> StartedEngine:
    """Build everything in order; on a failure release what exists, in reverse. Raises StartupError for the operator.

    `on_loaded` is called between loading the weights and sizing the KV cache.
    """
    started = time.monotonic()
    model = load_model(settings, failure_callback, _log_progress)
    executor = model.executor
    try:
        on_loaded()
        stamps = [started, time.monotonic()]
        num_blocks = executor.determine_num_blocks(settings.block_size)
        kinds = () if model.vocabulary is None else GRAMMAR_KINDS
        config = resolve_config(settings, model.served_model, executor.model_info, num_blocks, kinds)
        if not executor.model_info.is_causal:
            logger.info("the model is not causal: chunked prefill and prefix caching are off")
        stamps.append(time.monotonic())
        executor.initialize_kv_cache(num_blocks, settings.block_size)
        stamps.append(time.monotonic())
        executor.warm_up()
        stamps.append(time.monotonic())
        core = EngineCore(executor, config, clock, _structured_output(settings, model.vocabulary, clock))
        if settings.mfu_metrics:
            num_workers = settings.tensor_parallel_size * settings.pipeline_parallel_size
            core.step_costs = StepCosts(executor.model_info, num_workers)
        if settings.kv_cache_metrics:
            core.scheduler.kv_cache_manager.pool.residency = BlockResidency(settings.kv_cache_metrics_sample)
    except BaseException:
        executor.shutdown()
        raise
    _freeze_garbage_collector()
    logger.info(
        "ready in %.1f s: %s, %s, %d KV blocks of %d tokens, context %d",
        time.monotonic() - started,
        config.served_model.name,
        executor.model_info.dtype,
        config.num_blocks,
        config.block_size,
        config.max_model_len,
    )
    times = dict(zip(STARTUP_PHASES, (end - begin for begin, end in pairwise(stamps)), strict=True))
    return StartedEngine(core, model.tokenizer_archive, times)


def _structured_output(
    settings: EngineSettings, vocabulary: Vocabulary | None, clock: Callable[[], float]
) -> StructuredOutputManager | None:
    if vocabulary is None:
        return None
    # Here and not at the top: it imports torch, which takes seconds, and the health port must be up before that.
    from engine_core.structured_output.manager import StructuredOutputManager

    return StructuredOutputManager(
        vocabulary, timeout_s=settings.grammar_compile_timeout_s, cache_bytes=settings.grammar_cache_bytes, clock=clock
    )


def _log_progress(message: str) -> None:
    logger.info("%s", message)


def _freeze_garbage_collector() -> None:
    """What exists now lives as long as the process: no later collection needs to walk it."""
    gc.collect()
    gc.freeze()
