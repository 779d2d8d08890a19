"""The engines that are compared, as things that answer tasks. Each is started once and measured many times.

Whoever is not measured is idle, and waits without using a core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

import psutil

from bench import engine_flags, running_service
from bench.peers import driver, places
from bench.peers.tasks import SHORT_LEN, Task

Figures = dict[str, float]
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 30.0
LOGS = engine_flags.BUILD / "logs"
PROMPTS = engine_flags.BUILD / "prompts.json"


class Contestant(Protocol):
    """Ready to answer."""

    def measure(self, task: Task) -> list[Figures]:
        """`tok_s`, `wall_s`, `ttft_mean` and `itl_mean` (ms; where known) of each repetition."""


class Served:
    """A server, driven by `stepwire bench` in a process of its own."""

    def __init__(self, *address: str) -> None:
        self._address = address

    def measure(self, task: Task) -> list[Figures]:
        command = [
            *(sys.executable, "-m", "stepwire_client.cli", "bench", *self._address, "--json", "--warm-up", "0"),
            *("--prompts", str(PROMPTS), "--kind", task.kind, "--first-prompt", str(task.first)),
            *("--concurrency", str(task.count), "--num-requests", str(task.count), "--vocab-size", "49000"),
            *("--output-len", str(task.max_tokens), "--repetitions", str(task.repetitions), "--repeat-requests"),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]


class Driven:
    """An engine in process, behind the loop of `driver.py`."""

    def __init__(self, process: subprocess.Popen[str], stdin: IO[str], stdout: IO[str]) -> None:
        self._process = process
        self._stdin = stdin
        self._stdout = stdout

    def wait_until_ready(self) -> None:
        self._next(driver.READY)

    def measure(self, task: Task) -> list[Figures]:
        self._stdin.write(task.to_line() + "\n")
        self._stdin.flush()
        return [json.loads(self._next(driver.MARK)) for _ in range(task.repetitions)]

    def _next(self, mark: str) -> str:
        for line in self._stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise RuntimeError(f"{self._process.args!r} has ended; its log is in {LOGS}")


class LlamaBatched:
    """llama.cpp without a server: a program that is started for each measurement, with tokens of its own."""

    def measure(self, task: Task) -> list[Figures]:
        cores = str(os.cpu_count() or 1)
        command = [
            *(places.llama_program("llama-batched-bench"), "-m", places.bf16_gguf(), "-t", cores, "-tb", cores),
            *("-c", "16384", "-b", "2048", "-ub", "512", "-npp", str(SHORT_LEN), "-ntg", str(task.max_tokens)),
            *("-npl", str(task.count), "--output-format", "jsonl"),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        [row] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        # `t` includes the prompts' time, as everywhere here; the speeds it prints do not.
        wall_s, num_tokens = row["t"], row["pl"] * row["tg"]
        itl_mean = row["t_tg"] / row["tg"] * 1e3
        return [{"tok_s": num_tokens / wall_s, "wall_s": wall_s, "ttft_mean": row["t_pp"] * 1e3, "itl_mean": itl_mean}]


@contextmanager
def stepwire_service(**changes: object) -> Iterator[Contestant]:
    with running_service.running(*engine_flags.flags(**changes)) as service:
        yield _warm(Served("--target", service.target))


@contextmanager
def stepwire_offline(**changes: object) -> Iterator[Contestant]:
    command = [sys.executable, "-m", "bench.peers.stepwire_driver", json.dumps(changes), str(PROMPTS)]
    with _driven("stepwire-offline", command, None) as contestant:
        yield contestant


@contextmanager
def vllm_offline(model: Path, dtype: str, max_num_seqs: int = 128) -> Iterator[Contestant]:
    arguments = [str(model), dtype, str(max_num_seqs), str(PROMPTS)]
    command = [str(places.vllm_python()), "-m", "bench.peers.vllm_driver", *arguments]
    with _driven("vllm-offline", command, places.vllm_environment()) as contestant:
        yield contestant


@contextmanager
def vllm_server(model: Path, dtype: str) -> Iterator[Contestant]:
    port = str(running_service.free_port())
    command = [
        # `vllm serve` asks for a distribution called vllm, which the CPU build is not.
        *(str(places.vllm_python()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--dtype", dtype, "--served-model-name", "bench", "--max-model-len", "2048", "--max-num-seqs", "128"),
        *("--host", "127.0.0.1", "--port", port),
    ]
    with ExitStack() as stack:
        process = _start("vllm-server", command, places.vllm_environment(), stack, is_driver=False)
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/health", process)
        yield _warm(Served("--url", url, "--model", "bench"))


@contextmanager
def llama_batched() -> Iterator[Contestant]:
    places.bf16_gguf()
    yield LlamaBatched()


@contextmanager
def _driven(name: str, command: Sequence[str], environment: Mapping[str, str] | None) -> Iterator[Driven]:
    with ExitStack() as stack:
        process = _start(name, command, environment, stack, is_driver=True)
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a driver needs both pipes")
        contestant = Driven(process, process.stdin, process.stdout)
        contestant.wait_until_ready()
        yield contestant


def _start(
    name: str, command: Sequence[str], environment: Mapping[str, str] | None, stack: ExitStack, *, is_driver: bool
) -> subprocess.Popen[str]:
    LOGS.mkdir(parents=True, exist_ok=True)
    log = stack.enter_context((LOGS / f"{name}.log").open("w"))
    process = stack.enter_context(
        subprocess.Popen(
            command,
            cwd=engine_flags.ROOT,
            env=environment,
            stdin=subprocess.PIPE if is_driver else subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_driver else log,
            stderr=log,
            text=True,
        )
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    """A driver ends with its stdin, a server with SIGTERM; what they started, and left, is ended too."""
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    if process.stdin is not None and process.stdout is not None:
        process.stdin.close()
    else:
        process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    for child in started:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def _wait_for(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"{url} did not come up; its log is in {LOGS}")


def _warm(contestant: Contestant) -> Contestant:
    contestant.measure(Task("warm", 0, 8, 8))
    return contestant
