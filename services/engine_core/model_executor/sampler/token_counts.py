"""How often each token occurs in one request's output, kept up to date token by token.

Owner: the busy-loop thread. Follows the worker's record of the request, which only ever grows: a preemption changes
nothing here, and a resumed request is counted from its resumed output.
"""

from __future__ import annotations

import numpy as np

_FIRST_CAPACITY = 64


class TokenCounts:
    """Distinct tokens of a request in parallel arrays; a token of the prompt alone has the count 0."""

    def __init__(self, prompt_token_ids: np.ndarray) -> None:
        """`prompt_token_ids`: those that rules look at."""
        prompt = np.unique(prompt_token_ids)
        self._places: dict[int, int] = {token_id: place for place, token_id in enumerate(prompt.tolist())}
        self._token_ids = np.zeros(max(_FIRST_CAPACITY, 2 * len(prompt)), dtype=np.int64)
        self._token_ids[: len(prompt)] = prompt
        self._counts = np.zeros(len(self._token_ids), dtype=np.float32)
        self._num_counted = 0

    @property
    def token_ids(self) -> np.ndarray:
        """int64 [N]"""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """Occurrences in the output, float32 [N]."""
        return self._counts[: len(self._places)]

    def follow(self, output_token_ids: np.ndarray) -> None:
        """Count what has come since the last call."""
        for token_id in output_token_ids[self._num_counted :].tolist():
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._token_ids):
                self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._token_ids[place] = token_id
            self._counts[place] += 1
        self._num_counted = len(output_token_ids)
