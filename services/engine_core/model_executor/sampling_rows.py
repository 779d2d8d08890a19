"""What requests asked of the sampler, by their row in the worker's record.

Owner: the busy-loop thread. Most ask for nothing but the likeliest token: a step looks at one flag for each of those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine_core.model_executor.sampler.sampling_batch import SAMPLING_DTYPE, LogitsRules, RuledRow, sampling_record
from engine_core.model_executor.sampler.token_counts import TokenCounts
from engine_core.scheduler.output import NewRequestData
from engine_core.scheduler.request import NO_LOGPROBS, LogprobsParams


@dataclass(frozen=True, slots=True)
class _Ruled:
    rules: LogitsRules
    counts: TokenCounts | None


class SamplingRows:
    """Parameters as arrays, rules and log-probabilities of the few rows that want some."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # SAMPLING_DTYPE, by row.
        self.params = np.zeros(num_rows, dtype=SAMPLING_DTYPE)
        # Rows that need more than an arg-max.
        self.is_special = np.zeros(num_rows, dtype=bool)
        self.logprobs: dict[int, LogprobsParams] = {}
        self._ruled: dict[int, _Ruled] = {}

    def ensure_rows(self, num_rows: int) -> None:
        num_missing = max(0, num_rows - len(self.params))
        self.params = np.concatenate([self.params, np.zeros(num_missing, dtype=SAMPLING_DTYPE)])
        self.is_special = np.concatenate([self.is_special, np.zeros(num_missing, dtype=bool)])

    def add(self, row: int, new: NewRequestData) -> None:
        self.params[row] = sampling_record(new.sampling)
        rules = LogitsRules.of(new, self._vocab_size)
        if rules is not None:
            self._ruled[row] = _Ruled(rules, rules.start_counts(np.array(new.prompt_token_ids, dtype=np.int64)))
        if new.logprobs != NO_LOGPROBS:
            self.logprobs[row] = new.logprobs
        self.is_special[row] = new.sampling.temperature > 0 or rules is not None

    def remove(self, row: int) -> None:
        self._ruled.pop(row, None)
        self.logprobs.pop(row, None)
        self.is_special[row] = False

    def ruled_rows(
        self, rows: np.ndarray, num_outputs: np.ndarray, output_of: Callable[[int], np.ndarray]
    ) -> list[RuledRow]:
        """Those of `rows` with rules in force after `num_outputs` tokens each, by their place in `rows`."""
        found: list[RuledRow] = []
        for place, row in enumerate(rows.tolist() if self._ruled else ()):
            ruled = self._ruled.get(row)
            if ruled is None:
                continue
            if ruled.rules.apply_after(int(num_outputs[place])):
                found.append(RuledRow(place, ruled.rules, output_of(row), ruled.counts))
            else:
                # Over for good: output only grows.
                del self._ruled[row]
                self.is_special[row] = self.params["temperature"][row] > 0
        return found
