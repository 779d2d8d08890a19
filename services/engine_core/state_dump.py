"""A description of what the engine is doing, taken by the loop between two steps. Counts only, never content."""

from __future__ import annotations

import queue
import sys
import threading
import traceback

from engine_core.core import EngineCore
from engine_core.messages import InputMessage
from engine_core.operations import DumpState, RequestState, StateDump
from engine_core.output_queue import OutputQueue


def dump_state(
    core: EngineCore, input_queue: queue.SimpleQueue[InputMessage], output_queue: OutputQueue, call: DumpState
) -> StateDump:
    """Consistent: nothing runs while the loop makes it."""
    scheduler = core.scheduler
    pool = scheduler.kv_cache_manager.pool
    return StateDump(
        step=core.num_steps,
        num_free_blocks=pool.num_available - pool.num_cached,
        num_cached_blocks=pool.num_cached,
        num_used_blocks=pool.num_used,
        num_total_blocks=len(pool.blocks),
        violations=scheduler.check_integrity(),
        requests=_request_states(core) if call.include_requests else [],
        thread_stacks=_thread_stacks() if call.include_stacks else "",
        input_queue_depth=input_queue.qsize(),
        output_queue_depth=output_queue.depth,
        aborts_queue_depth=core.aborts_queue.qsize(),
    )


def _request_states(core: EngineCore) -> list[RequestState]:
    scheduler, now = core.scheduler, core.clock()
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
