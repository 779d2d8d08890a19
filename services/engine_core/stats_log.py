"""One line of figures every few seconds, for whoever has nothing but the log. Written by the monitor's thread.

Rates are of the time since the line before. An idle engine says so once, and goes on at DEBUG.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine_core.scheduler.output import SchedulerStats
from engine_core.step_times import StepTimes
from stepwire.metrics import FAST_BUCKETS

logger = logging.getLogger(__name__)

_MS = 1000.0


@dataclass(frozen=True, slots=True)
class _Reading:
    time: float
    stats: SchedulerStats
    # Steps by bucket of FAST_BUCKETS, and the seconds of all of them and of their parts on the device.
    steps: tuple[int, ...]
    step_s: float
    execute_s: float


class StatsLog:
    """`look` regularly; `interval_s` 0 = never a line."""

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._last = _Reading(now, SchedulerStats(), (0,) * (len(FAST_BUCKETS) + 1), 0.0, 0.0)
        self._was_idle = True

    def look(self, stats: SchedulerStats, times: StepTimes, now: float) -> None:
        """Write the line if it is time for one."""
        if not self._interval_s or now - self._last.time < self._interval_s:
            return
        last, current = self._last, _read(stats, times, now)
        self._last = current
        is_idle = current.steps == last.steps and not (stats.num_running or stats.num_waiting)
        level = logging.DEBUG if is_idle and self._was_idle else logging.INFO
        self._was_idle = is_idle
        if logger.isEnabledFor(level):
            logger.log(level, "%s", _line(last, current))


def _read(stats: SchedulerStats, times: StepTimes, now: float) -> _Reading:
    durations = times.durations.values()
    steps = tuple(sum(counts) for counts in zip(*(list(kind.counts) for kind in durations), strict=True))
    return _Reading(now, stats, steps, sum(kind.total for kind in durations), times.execute.total)


def _line(last: _Reading, current: _Reading) -> str:
    elapsed_s = current.time - last.time
    new, old = current.stats, last.stats
    num_computed = (new.num_prompt_tokens - new.num_cached_prompt_tokens) - (
        old.num_prompt_tokens - old.num_cached_prompt_tokens
    )
    steps = [now - before for now, before in zip(current.steps, last.steps, strict=True)]
    step_s = current.step_s - last.step_s
    queries = new.prefix_query_tokens - old.prefix_query_tokens
    parts = [
        f"prompt {num_computed / elapsed_s:.0f} tok/s",
        f"generation {(new.num_generation_tokens - old.num_generation_tokens) / elapsed_s:.0f} tok/s",
        f"{new.num_running} running",
        f"{new.num_waiting} waiting ({new.num_waiting_deferred} deferred)",
        f"{new.num_preemptions - old.num_preemptions} preemptions",
        f"KV {100 * new.num_used_blocks / max(1, new.num_total_blocks):.1f} %",
    ]
    if queries:
        parts.append(f"prefix hits {100 * (new.prefix_hit_tokens - old.prefix_hit_tokens) / queries:.1f} %")
    if any(steps):
        parts.append(f"step p50 < {_quantile(steps, 0.5) * _MS:g} ms, p99 < {_quantile(steps, 0.99) * _MS:g} ms")
        parts.append(f"loop share {max(0.0, 100 * (1 - (current.execute_s - last.execute_s) / step_s)):.0f} %")
    return ", ".join(parts)


def _quantile(counts: Sequence[int], share: float) -> float:
    """The upper bound of the bucket that holds it; beyond the last bound, that bound."""
    wanted = share * sum(counts)
    index = next(place for place, total in enumerate(accumulate(counts)) if total >= wanted)
    return FAST_BUCKETS[min(index, len(FAST_BUCKETS) - 1)]
