"""What the last of several workers fails with while the others do their part; the workers import it by its name."""

from __future__ import annotations

from engine_core.model_executor.in_process_executor import InProcessExecutor

MESSAGE = "no such batch"


def fail_in_the_last(executor: InProcessExecutor, num_tokens: int) -> None:
    """In place of `InProcessExecutor.execute_dummy_batch`: the others wait for this one in their first sum."""
    group = executor._group
    assert group is not None
    if group.place.rank == group.place.num_workers - 1:
        raise RuntimeError(MESSAGE)
    executor.execute_dummy_batch(num_tokens)
