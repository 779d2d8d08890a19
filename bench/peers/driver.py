"""The loop of a driver: tasks as lines on stdin, a marked line of figures on stdout for each repetition.

Runs inside other engines' environments: standard library only. What the engine prints itself has no mark.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.peers.tasks import Task

MARK = "@figures "
READY = "@ready"


@dataclass(frozen=True, slots=True)
class Answers:
    """What a batch brought. Times are seconds of each request; none where the engine does not tell."""

    num_tokens: int
    ttfts_s: list[float]
    itls_s: list[float]


Generate = Callable[[list[list[int]], int], Answers]


def serve(generate: Generate, prompts_file: Path) -> None:
    """Warm up, say so, and answer tasks until stdin ends."""
    generate(Task("warm", 0, 8, 8).prompts(prompts_file), 8)
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        task = Task.from_line(line)
        prompts = task.prompts(prompts_file)
        for _ in range(task.repetitions):
            started = time.perf_counter()
            answers = generate(prompts, task.max_tokens)
            wall_s = time.perf_counter() - started
            sys.stdout.write(MARK + json.dumps(_figures(answers, wall_s)) + "\n")
            sys.stdout.flush()


def _figures(answers: Answers, wall_s: float) -> dict[str, float | None]:
    return {
        "tok_s": answers.num_tokens / wall_s,
        "wall_s": wall_s,
        "output_tokens": answers.num_tokens,
        "ttft_mean": fmean(answers.ttfts_s) * 1e3 if answers.ttfts_s else None,
        "itl_mean": fmean(answers.itls_s) * 1e3 if answers.itls_s else None,
    }
