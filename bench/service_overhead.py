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
    # Of each hand-over: the time that the loop did not run.
    waited_us: float


def measure_service(
    concurrency: int, *, step_ms: float = 0.0, num_tokens: int = 128, num_rounds: int = 4, model_dir: Path = MODEL
) -> ServiceCost:
    """Start both services and a client, `num_rounds` requests on each of `concurrency` streams."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        report = Path(directory) / "report.json"
        engine_flags = (*ENGINE_FLAGS, "--step-ms", str(step_ms), "--report", str(report), "--metrics-port", "0")
        script = str(HERE / "instant_engine.py")
        engine, port = stack.enter_context(_service(script, "--port", "0", *engine_flags))
        frontend, frontend_port = stack.enter_context(
            _service("-m", "frontend", "--port", "0", "--admin-port", "0", "--metrics-port", "0",
                     "--tokenizer", str(model_dir), "--engine-endpoints", f"127.0.0.1:{port}")
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
        loop["waited_us"]["median"],
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


def rows() -> list[dict[str, object]]:
    """The rows of bench/results for the service around a model that takes no time."""
    at_once, paced = measure_service(256), measure_service(64, step_ms=50.0, num_rounds=1)
    figures = (
        ("service, tokens/s", "c = 256, model at once", at_once.tokens_per_s, 20_000, "higher"),
        ("frontend, CPU µs a token", "c = 256, model at once", at_once.frontend_us, 25, "lower"),
        ("step loop in the service, µs a step", "64 running, a step each 50 ms", paced.loop_us, 500, "lower"),
        # The resolution of the clocks, and no wait.
        ("loop waited for the transport, µs a step", "c = 256, model at once", at_once.waited_us, 1, "lower"),
    )
    return [_row(*figure) for figure in figures]


def _row(name: str, case: str, value: float, target: float, better: str) -> dict[str, object]:
    is_met = value >= target if better == "higher" else value <= target
    return {"name": name, "case": case, "value": value, "target": target, "better": better, "met": is_met}


def main() -> None:
    columns = ("c", "step ms", "tok/s", "tok/message", "client µs", "frontend µs", "engine µs", "loop µs", "waited µs")
    table = Table(*columns, title="CPU µs a token, loop µs a step")
    for concurrency, step_ms in ((64, 0.0), (256, 0.0), (64, 50.0), (256, 100.0)):
        cost = measure_service(concurrency, step_ms=step_ms, num_rounds=1 if step_ms else 4)
        figures = (cost.tokens_per_message, cost.client_us, cost.frontend_us, cost.engine_us, cost.loop_us)
        cells = (f"{figure:.1f}" for figure in (*figures, cost.waited_us))
        table.add_row(str(concurrency), f"{step_ms:g}", f"{cost.tokens_per_s:.0f}", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
