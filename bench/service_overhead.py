"""What the service costs around a model that takes no time: engine, frontend and client as real processes.

`measure_service` gives one measurement, `rows` the rows of docs/performance.md. At once: the engine answers as fast as
the loop turns, and what the frontend can not keep up with is merged on the way. Paced: steps take as long as told, so
that every token is a message of its own and costs are those of an ordinary stream.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
MODEL = HERE.parent / "models" / "SmolLM2-135M-Instruct-fp32"
START_S = 60.0
RUN_S = 120.0
ENGINE_FLAGS = ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192", "--num-blocks", "65536")


@dataclass(frozen=True)
class ServiceCost:
    """One measurement. Microseconds of CPU time are those of all threads of a process, system calls included."""

    concurrency: int
    step_ms: float
    tokens_per_s: float
    tokens_per_message: float
    client_us: float
    frontend_us: float
    engine_us: float
    # Wall time of the loop between two calls of the executor, with all requests running.
    loop_us: float
    hand_over_p99_us: float


def measure_service(
    concurrency: int, *, step_ms: float = 0.0, num_tokens: int = 128, num_rounds: int = 4
) -> ServiceCost:
    """Start both services and a client, `num_rounds` requests on each of `concurrency` streams."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        report = Path(directory) / "report.json"
        engine_flags = (*ENGINE_FLAGS, "--step-ms", str(step_ms), "--report", str(report), "--metrics-port", "0")
        script = str(HERE / "instant_engine.py")
        engine, port = stack.enter_context(_service(script, "--port", "0", *engine_flags))
        frontend, frontend_port = stack.enter_context(
            _service("-m", "frontend", "--port", "0", "--admin-port", "0", "--metrics-port", "0",
                     "--tokenizer", str(MODEL), "--engine-endpoints", f"127.0.0.1:{port}")
        )  # fmt: skip
        numbers = (concurrency, concurrency * num_rounds, num_tokens, frontend.pid, engine.pid)
        client = [sys.executable, str(HERE / "stream_client.py"), f"127.0.0.1:{frontend_port}", *map(str, numbers)]
        seen = json.loads(subprocess.run(client, capture_output=True, text=True, timeout=RUN_S, check=True).stdout)
        _stop(frontend)
        _stop(engine)
        loop = json.loads(report.read_text())
    client_us, frontend_us, engine_us = (cpu_s / seen["tokens"] * 1e6 for cpu_s in seen["cpu_s"])
    return ServiceCost(
        concurrency,
        step_ms,
        seen["tokens"] / seen["wall_s"],
        seen["tokens"] / seen["messages"],
        client_us,
        frontend_us,
        engine_us,
        loop["loop_us"].get(str(concurrency), {}).get("median", 0.0),
        loop["hand_over"]["p99_us"],
    )


@contextmanager
def _service(*command: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        yield process, _port_of(process)
    finally:
        process.kill()
        process.wait()


def _port_of(process: subprocess.Popen[str]) -> int:
    assert process.stderr is not None
    for line in process.stderr:
        sys.stderr.write(line)
        if found := re.search(r"[ :](\d+), metrics on", line):
            port = int(found[1])
        if "listens on" in line or "is ready:" in line:
            return port
    raise RuntimeError("a service did not start")


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=START_S)


def main() -> None:
    table = Table(
        "c", "step ms", "tok/s", "tok/msg", "client µs", "frontend µs", "engine µs", "loop µs/step", "put p99 µs"
    )
    for concurrency, step_ms in ((64, 0.0), (256, 0.0), (64, 10.0), (256, 30.0)):
        cost = measure_service(concurrency, step_ms=step_ms)
        figures = (cost.tokens_per_s, cost.tokens_per_message, cost.client_us, cost.frontend_us, cost.engine_us)
        table.add_row(str(concurrency), f"{step_ms:g}", *(f"{figure:.1f}" for figure in figures),
                      f"{cost.loop_us:.0f}", f"{cost.hand_over_p99_us:.0f}")  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
