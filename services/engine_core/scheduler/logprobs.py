"""Which of the log-probabilities a step brought are news: each prompt row once, one row for each token that counts.

Pure. Cuts rows and never looks into them.
"""

from __future__ import annotations

from engine_core.scheduler.output import EngineCoreOutput, ModelRunnerOutput, PromptLogprobs
from engine_core.scheduler.request import Request
from stepwire.errors import InvariantViolation
from stepwire.packed_logprobs import PackedLogprobs


def new_prompt_rows(request: Request, found: PromptLogprobs | None) -> PackedLogprobs | None:
    """The rows that were not sent before: a preempted request computes its prompt again from the start."""
    if found is None:
        return None
    num_known = request.num_prompt_logprobs - found.start
    if num_known < 0:
        raise InvariantViolation(
            f"request {request.key}: prompt rows from {found.start} on, but {request.num_prompt_logprobs} were sent"
        )
    if num_known >= found.rows.num_rows:
        return None
    request.num_prompt_logprobs = found.start + found.rows.num_rows
    return found.rows.rows(num_known)


def attach_token_rows(output: EngineCoreOutput, runner_output: ModelRunnerOutput) -> None:
    """One row for each new token; those of tokens after a stop are dropped with them."""
    rows = runner_output.logprobs.get(output.key)
    if rows is not None and output.new_token_ids:
        output.logprobs = rows.rows(0, len(output.new_token_ids))
