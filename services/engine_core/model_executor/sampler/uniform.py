"""The random number behind output token i of a request: a pure function of (seed, i), without generator state.

So a request does not depend on its batch neighbours, repeats itself after a preemption, and goes on unchanged on
another engine. Changing a constant here changes every sampled answer. Pure functions; any thread.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 [B], for seeds uint64 [B] and output token indices [B].

    A counter behind the finaliser of SplitMix64. The seed is mixed by itself first: choices of one request have
    consecutive seeds, and (seed + 1, i) must have nothing in common with (seed, i + 1).
    """
    streams = _mix(seeds.astype(np.uint64) + _GOLDEN)
    words = _mix(streams + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # The upper 53 bits: as many as a float64 below 1 holds exactly.
    numbers: np.ndarray = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = words ^ (words >> np.uint64(31))
    return mixed
