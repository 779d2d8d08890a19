"""What the service costs around a model that takes no time: engine and frontend as real processes, the client here.

At once: the engine answers as fast as its loop turns, and what the frontend can not keep up with is merged on the way.
Paced: steps take as long as told, so that every token is a message of its own and costs are those of an ordinary
stream.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import psutil

from bench import engine_flags, rows, running_service
from bench.rows import Row
from bench.running_service import RunningService
from stepwire_client.load.workload import Lengths, LoadRequest, synthetic

MODEL = engine_flags.ROOT / "models" / "SmolLM2-135M-Instruct-fp32"
ENGINE_FLAGS = ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192", "--num-blocks", "65536")
PROMPT_LENGTHS = Lengths(8, 8)
VOCAB_SIZE = 20_000
# The resolution of the clocks, and no wait.
WAIT_TARGET_US = 1.0


@dataclass(frozen=True, slots=True)
class ServiceCost:
    """One measurement. Microseconds of CPU time are those of all threads of a process, system calls included."""

    tok_s: float
    tokens_a_message: float
    client_us: float
    frontend_us: float
    engine_us: float
    # By the number of running requests: median wall time of the loop between two calls of the executor.
    loops_us: dict[int, float]
    # Mean and p99 over the hand-overs to the transport: the time that the loop did not run.
    waited_us: float
    waited_p99_us: float

    def loop_us(self, num_running: int) -> float:
        """Raises where that was not measured: a missing figure would meet any target."""
        if num_running not in self.loops_us:
            raise RuntimeError(f"no step had {num_running} requests, but {sorted(self.loops_us)}")
        return self.loops_us[num_running]


def running(report: Path, step_ms: float = 0.0, model_dir: Path = MODEL) -> AbstractContextManager[RunningService]:
    """The services; `model_dir` has the tokenizer. The engine writes `report` at its end."""
    flags = (*ENGINE_FLAGS, "--step-ms", str(step_ms), "--report", str(report), "--", "--tokenizer", str(model_dir))
    return running_service.running(*flags, engine_module="bench.instant_engine")


def requests(num_tokens: int, seed: str) -> Iterator[LoadRequest]:
    """Endless short prompts with answers of one length."""
    return synthetic(PROMPT_LENGTHS, Lengths(num_tokens, num_tokens), 0, VOCAB_SIZE, seed)


def measure_service(
    concurrency: int, *, step_ms: float = 0.0, num_tokens: int = 128, num_rounds: int = 4, model_dir: Path = MODEL
) -> ServiceCost:
    """Start both services and send `num_rounds` requests on each of `concurrency` streams."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        with running(report, step_ms, model_dir) as service:
            service.answer(list(islice(requests(8, "warm-up"), concurrency)), concurrency)
            processes = (psutil.Process(), service.frontend, service.engine)
            batch = list(islice(requests(num_tokens, "measured"), concurrency * num_rounds))
            before = [_cpu_s(process) for process in processes]
            result = service.answer(batch, concurrency)
            used = [_cpu_s(process) - start for process, start in zip(processes, before, strict=True)]
        loop = json.loads(report.read_text(encoding="utf-8"))
    tokens = sum(reply.num_tokens for reply in result.replies)
    messages = sum(len(reply.chunk_times) for reply in result.replies)
    return ServiceCost(
        tokens / result.wall_s,
        tokens / messages,
        *(cpu_s / tokens * 1e6 for cpu_s in used),
        {int(size): gaps["median"] for size, gaps in loop["loop_us"].items()},
        loop["waited_us"]["mean"],
        loop["waited_us"]["p99"],
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure() -> Iterator[Row]:
    at_once = measure_service(256)
    case = "c=256, model at once"
    yield Row("end to end around an instant model, tok/s", case, at_once.tok_s, 20_000, "higher")
    yield Row("frontend CPU, µs a token", case, at_once.frontend_us, 25)
    yield Row("loop waited for the transport, µs a hand-over", case, at_once.waited_us, WAIT_TARGET_US)
    yield Row("the same, p99", case, at_once.waited_p99_us)
    yield from _others(at_once, case)
    paced = measure_service(64, step_ms=50.0, num_rounds=1)
    case = "c=64, a step each 50 ms"
    yield Row("step loop in the service, µs a step", case, paced.loop_us(64), 500)
    yield Row("frontend CPU, µs a token", case, paced.frontend_us)
    yield from _others(paced, case)


def _others(cost: ServiceCost, case: str) -> Iterator[Row]:
    yield Row("tokens a message", case, cost.tokens_a_message)
    yield Row("engine CPU, µs a token", case, cost.engine_us)
    yield Row("client CPU, µs a token", case, cost.client_us)


if __name__ == "__main__":
    rows.main(measure)
