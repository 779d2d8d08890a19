"""A description of what the engine is doing, taken by the loop between two steps. Counts only, never content."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING

from engine_core.operations import DumpState, RequestState, StateDump

if TYPE_CHECKING:
    from engine_core.core_proc import EngineCoreProc


def dump_state(proc: EngineCoreProc, call: DumpState) -> StateDump:
    """Consistent: nothing runs while the loop makes it."""
    scheduler = proc.core.scheduler
    pool = scheduler.kv_cache_manager.pool
    return StateDump(
        step=proc.core.num_steps,
        num_free_blocks=pool.num_available - pool.num_cached,
        num_cached_blocks=pool.num_cached,
        num_used_blocks=pool.num_used,
        num_total_blocks=len(pool.blocks),
        violations=scheduler.check_integrity(),
        requests=_request_states(proc) if call.include_requests else [],
        thread_stacks=_thread_stacks() if call.include_stacks else "",
        input_queue_depth=proc.input_queue.qsize(),
        output_queue_depth=proc.output_queue.depth,
        aborts_queue_depth=proc.aborts_queue.qsize(),
    )


def _request_states(proc: EngineCoreProc) -> list[RequestState]:
    scheduler, now = proc.core.scheduler, proc.core.clock()
    return [
        RequestState(
            request_id=request.request_id,
            key=request.key,
            status=request.status.name,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(request.output_token_ids),
            num_computed_tokens=request.num_computed_tokens,
            num_blocks=scheduler.kv_cache_manager.num_blocks(request.key),
            num_preemptions=request.num_preemptions,
            age_s=now - request.arrival_time,
        )
        for request in scheduler.requests.values()
    ]


def _thread_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
