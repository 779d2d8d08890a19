"""Both services as processes of their own, to be sent anything, and what must be true of them afterwards."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from free_ports import free_port
from fuzzed_stack import ENGINE_FLAGS, IDLE_METRICS, write_model
from running_engine import RunningEngine, running_engine
from running_frontend import request
from running_stack import SERVING, Frontend, wait_until_zero

# A refusal is a line of INFO at most; what strangers send must not look like a failure of ours.
_FAULT = re.compile(r" (ERROR|CRITICAL) |Traceback")
_FRONTEND_FLAGS = ("--allow-request-chat-template", "--max-concurrent-requests", "64", "--tool-call-parser", "hermes")
_MAX_POLLS = 2000


class FuzzedProcesses:
    """Serving."""

    def __init__(self, engine: RunningEngine, frontend: Frontend, http_port: int) -> None:
        self.engine = engine
        self.frontend = frontend
        self.http_url = f"http://127.0.0.1:{http_port}"

    def check_unharmed(self) -> None:
        """Both processes run and answer, no KV block is in use, and neither has logged a failure."""
        for _ in range(_MAX_POLLS):
            answer = self.frontend.generation.Generate(request(), timeout=30)
            assert answer.usage.completion_tokens == 4
            if all(self.engine.metric(rf"{name}\{{.*\}}") == 0 for name in IDLE_METRICS):
                break
        else:
            raise AssertionError("the engine does not become idle")
        assert urllib.request.urlopen(f"{self.http_url}/health", timeout=30).status == 200
        wait_until_zero(self.frontend, "stepwire_frontend_live_handles", within_s=30)
        for log in (self.engine.log, self.frontend.log):
            assert [line for line in log if _FAULT.search(line)] == [], "".join(log[-60:])
        assert self.engine.process.poll() is None
        assert self.frontend.process.poll() is None


@contextmanager
def fuzzed_processes(directory: Path, *flags: str, engine_flags: tuple[str, ...] = ()) -> Iterator[FuzzedProcesses]:
    """`flags` are the frontend's; `engine_flags` come behind those that all engines here have."""
    all_flags = ("--tokenizer", write_model(directory), *_FRONTEND_FLAGS, *flags)
    http_port = free_port()
    with running_engine(*ENGINE_FLAGS, *engine_flags) as engine:
        frontend = Frontend(engine.port, cache_dir=directory / "cache", http_port=http_port, flags=all_flags)
        try:
            frontend.wait_for_health(SERVING)
            yield FuzzedProcesses(engine, frontend, http_port)
            frontend.channel.close()
        finally:
            frontend.kill()
