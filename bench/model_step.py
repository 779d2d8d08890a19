"""The model's step over the floor of its packed matrix products, at several batch sizes.

Contexts grow from 64 to 192 tokens. Both are measured in turn, a few walks and a few steps at a time, so that both meet
the same machine; reported is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench import rows
from bench.loaded_model import LoadedModel
from bench.packed_floor import PackedFloor
from bench.rows import Row

TARGETS = {1: 1.10, 8: 1.20, 32: 1.25, 64: 1.30}
NUM_PROMPT_TOKENS = 64
NUM_OUTPUT_TOKENS = 128
STEPS_A_ROUND = 8


def measure() -> Iterator[Row]:
    model = LoadedModel()
    floor = PackedFloor(model.path)
    for batch_size, target in TARGETS.items():
        steps, floors = _alternate(model, floor, batch_size)
        ratio = statistics.median(step / base for step, base in zip(steps, floors, strict=True))
        case = f"B={batch_size}"
        yield Row("model step over packed-linear floor", case, ratio, target)
        yield Row("model step, ms", case, statistics.median(steps) * 1e3)
        yield Row("packed-linear floor, ms", case, statistics.median(floors) * 1e3)
    model.close()


def _alternate(model: LoadedModel, floor: PackedFloor, batch_size: int) -> tuple[list[float], list[float]]:
    """Medians of each round."""
    prompts = [[1000 + index, *range(100, 99 + NUM_PROMPT_TOKENS)] for index in range(batch_size)]
    model.begin(prompts, NUM_OUTPUT_TOKENS)
    steps, floors = [], []
    for _ in range((NUM_OUTPUT_TOKENS - 1) // STEPS_A_ROUND):
        floors.append(statistics.median(floor.run(batch_size) for _ in range(STEPS_A_ROUND // 2)))
        steps.append(statistics.median(model.decode() for _ in range(STEPS_A_ROUND)))
    # The first round warms both up.
    return steps[1:], floors[1:]


if __name__ == "__main__":
    rows.main(measure)
