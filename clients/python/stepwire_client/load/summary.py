"""A load's replies as figures: one row, whose keys are the columns of the table and the fields of `--json`. Pure.

Times are milliseconds. `tok_s` counts output tokens over the whole wall time, that of the prompts included.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from stepwire_client.load.loops import LoadResult

PERCENTILES = (50, 90, 99)
Row = dict[str, object]


def summarize(result: LoadResult) -> Row:
    """Failed requests are in `errors` by reason; tokens and times are those of complete answers."""
    complete = [reply for reply in result.replies if not reply.failure]
    num_tokens = sum(reply.num_tokens for reply in complete)
    # Per request, so that a server which puts several tokens into a message is measured like one that does not.
    itls = [
        (reply.chunk_times[-1] - reply.chunk_times[0]) / (reply.num_tokens - 1)
        for reply in complete
        if reply.num_tokens > 1
    ]
    gaps = [
        after - before
        for reply in complete
        for before, after in zip(reply.chunk_times, reply.chunk_times[1:], strict=False)
    ]
    return {
        "requests": len(result.replies),
        "failed": len(result.replies) - len(complete),
        "errors": dict(Counter(reply.failure for reply in result.replies if reply.failure)),
        "output_tokens": num_tokens,
        "min_tokens": min((reply.num_tokens for reply in complete), default=0),
        "wall_s": round(result.wall_s, 3),
        "tok_s": round(num_tokens / result.wall_s, 1),
        **_times("ttft", [reply.chunk_times[0] - reply.started for reply in complete]),
        "itl_mean": _mean_ms(itls),
        # Between messages as they came: what a reader of the stream sees.
        **_percentiles("itl", gaps),
        **_times("e2e", [reply.ended - reply.started for reply in complete]),
        "t_start": round(result.started_at, 2),
        "t_end": round(result.started_at + result.wall_s, 2),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of all do not exceed; `values` ascend and are not empty."""
    return values[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def _times(name: str, seconds: list[float]) -> Row:
    return {f"{name}_mean": _mean_ms(seconds), **_percentiles(name, seconds)}


def _percentiles(name: str, seconds: list[float]) -> Row:
    ascending = sorted(seconds)
    return {
        f"{name}_p{percent}": round(percentile(ascending, percent) * 1e3, 2) if ascending else None
        for percent in PERCENTILES
    }


def _mean_ms(seconds: list[float]) -> float | None:
    return round(statistics.fmean(seconds) * 1e3, 2) if seconds else None
