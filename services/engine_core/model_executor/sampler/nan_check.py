"""Which rows of the logits hold NaN: of those requests, whatever is sampled means nothing.

Owner: the thread that runs the model.
"""

from __future__ import annotations

import torch

from engine_core.model_executor.step_inputs import StepInputs
from engine_core.scheduler.request import RequestKey


def rows_with_nan(logits: torch.Tensor) -> torch.Tensor:
    """logits [S, V] -> bool [S] on the same device, not waited for."""
    # The largest of numbers among which is NaN is NaN: one look at each, and no mask as large as the logits.
    return logits.amax(dim=-1).isnan()


def keys_with_nan(inputs: StepInputs, rows: torch.Tensor) -> list[RequestKey]:
    """rows bool [S] -> the requests of those that are set. Waits for the device, whose work is done by then."""
    return [inputs.keys[index] for index in inputs.sampled[rows.cpu().numpy()].tolist()]
