"""How costs grow: of a step with running and with waiting requests, of a token with the length of the answer.

The engine's loop and the whole service around an executor that answers at once. Draws the curves into bench/results, or
with --document into docs/performance/growth.png, which belongs to the repository.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot

from bench import engine_flags, rows, service_overhead
from bench.rows import Row
from bench.running_service import RunningService
from bench.step_overhead import step_gaps

PICTURE = engine_flags.ROOT / "bench" / "results" / "growth.png"
DOCUMENT = engine_flags.ROOT / "docs" / "performance" / "growth.png"
NUM_RUNNING = (1, 16, 32, 64, 96, 128, 192, 256)
NUM_WAITING = (0, 100, 1000, 3000, 10_000)
BESIDE = 64
ANSWER_LENS = (64, 256, 1024, 2048, 4000)
NUM_ANSWERS = 16
NUM_ROUNDS = 3

Curve = dict[int, float]


def measure(picture: Path = PICTURE) -> Iterator[Row]:
    by_running = {number: statistics.median(step_gaps(number)) * 1e3 for number in NUM_RUNNING}
    by_waiting = {number: statistics.median(step_gaps(BESIDE, number)) * 1e3 for number in NUM_WAITING}
    with tempfile.TemporaryDirectory() as directory, service_overhead.running(Path(directory) / "report") as service:
        by_length = {length: _cost_a_token(service, length) for length in ANSWER_LENS}
    _draw(picture, by_running, by_waiting, by_length)
    yield Row("growth: step cost a request, 256 over 64 running", "step loop", by_running[256] / by_running[64] / 4)
    last_waiting = NUM_WAITING[-1]
    yield Row(
        f"growth: step cost, {last_waiting} over 0 waiting", "step loop", by_waiting[last_waiting] / by_waiting[0]
    )
    shortest, longest = ANSWER_LENS[0], ANSWER_LENS[-1]
    ratio = by_length[longest] / by_length[shortest]
    yield Row(f"growth: cost a token, answers of {longest} over {shortest}", "whole service", ratio)


def _cost_a_token(service: RunningService, length: int) -> float:
    """Microseconds of wall time; the least of the rounds."""
    requests = service_overhead.requests(length, f"growth {length}")
    count = NUM_ANSWERS * ANSWER_LENS[-1] // length // 4
    results = [service.answer(list(islice(requests, max(count, NUM_ANSWERS))), NUM_ANSWERS) for _ in range(NUM_ROUNDS)]
    return min(result.wall_s / sum(reply.num_tokens for reply in result.replies) for result in results) * 1e6


def _draw(picture: Path, by_running: Curve, by_waiting: Curve, by_length: Curve) -> None:
    mpl.use("Agg")
    figure, places = pyplot.subplots(1, 3, figsize=(13, 3.6))
    _plot(places[0], by_running, "running requests", "ms a step, around the model")
    _plot(places[1], by_waiting, f"waiting requests beside {BESIDE} running", "ms a step, around the model")
    _plot(places[2], by_length, f"tokens an answer, {NUM_ANSWERS} at once", "µs a token, whole service")
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)


def _plot(place: pyplot.Axes, curve: Curve, along: str, what: str) -> None:
    place.plot(list(curve), list(curve.values()), marker="o")
    place.set(xlabel=along, ylabel=what, xlim=(0, None), ylim=(0, 1.2 * max(curve.values())))
    place.grid(alpha=0.3)


def main() -> None:
    parser = rows.parser()
    parser.add_argument("--document", action="store_true", help=f"draw {DOCUMENT.relative_to(engine_flags.ROOT)}")
    arguments = parser.parse_args()
    rows.report(measure(DOCUMENT if arguments.document else PICTURE), is_json=arguments.json)


if __name__ == "__main__":
    main()
