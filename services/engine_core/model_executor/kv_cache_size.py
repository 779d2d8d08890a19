"""How many KV blocks fit: forced by a flag, a share of free memory on a CPU, a profiled forward pass on a GPU.

Owner: the thread that starts the engine. Allocates nothing that outlives the call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.host_memory import GIB, available_bytes, format_gib, parse_size
from engine_core.model_executor.startup_error import StartupError

# Unless --kv-cache-memory says otherwise; a developer's machine has other things to do as well.
_CPU_SHARE = 0.4
_CPU_LIMIT = 4 * GIB
# The null block and one that holds data.
_FEWEST_BLOCKS = 2


def determine_num_blocks(
    settings: EngineSettings,
    block_bytes: int,
    device: torch.device,
    run_largest_step: Callable[[], None],
    record_graphs: Callable[[], None],
    drop_graphs: Callable[[], None],
) -> int:
    """Blocks to allocate, null block included. Raises StartupError when not even one besides it fits."""
    if settings.num_blocks:
        return _require_a_block(settings.num_blocks, f"--num-blocks {settings.num_blocks}: at least 2 are needed")
    if device.type == "cuda":
        graph_bytes = _graph_bytes(device, record_graphs, drop_graphs)
        budget = _gpu_budget(settings, device, run_largest_step) - graph_bytes
        advice = "raise --gpu-memory-utilization or lower --max-num-batched-tokens"
    else:
        budget = _cpu_budget(settings)
        advice = "raise --kv-cache-memory or free memory"
    return _require_a_block(
        budget // block_bytes,
        f"no KV cache block fits: {_FEWEST_BLOCKS} blocks of {settings.block_size} tokens need "
        f"{format_gib(_FEWEST_BLOCKS * block_bytes)} and {format_gib(max(0, budget))} are to be had; {advice}",
    )


def _require_a_block(num_blocks: int, message: str) -> int:
    if num_blocks < _FEWEST_BLOCKS:
        raise StartupError(message)
    return num_blocks


def _cpu_budget(settings: EngineSettings) -> int:
    available = available_bytes()
    if not settings.kv_cache_memory:
        return min(_CPU_LIMIT, int(available * _CPU_SHARE))
    try:
        wanted = parse_size(settings.kv_cache_memory)
    except ValueError as error:
        raise StartupError(f"--kv-cache-memory: {error}") from error
    if wanted > available:
        raise StartupError(
            f"--kv-cache-memory {settings.kv_cache_memory}: only {format_gib(available)} of memory are free"
        )
    return wanted


def _gpu_budget(settings: EngineSettings, device: torch.device, run_largest_step: Callable[[], None]) -> int:
    """The allowed share of the device, less what the largest step takes at its peak and what others hold."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    held_by_others = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return int(total * settings.gpu_memory_utilization) - peak - held_by_others


def _graph_bytes(device: torch.device, record_graphs: Callable[[], None], drop_graphs: Callable[[], None]) -> int:
    """What recorded decode steps hold, found by recording them: the driver's share of it is in no statistics."""
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info(device)
    record_graphs()
    torch.cuda.synchronize(device)
    free_after, _ = torch.cuda.mem_get_info(device)
    drop_graphs()
    torch.cuda.empty_cache()
    return max(0, free_before - free_after)
