"""A whole stack to be mistreated, and what must be true of it afterwards.

The engine is the real process around the fake executor; the frontend runs in the test's event loop, so that a client
in the same loop can go away at any await of its handlers.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from fakes.small_tokenizer import byte_level_backend, write_model_dir
from free_ports import free_port
from running_engine import RunningEngine, running_engine
from running_frontend import SERVING, RunningFrontend, request, running_frontend
from stepwire.v1 import chat_service_pb2

TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function.name }}{% endfor %}{% endif %}
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"""
# 64 blocks: too few for what is asked at once, so that requests wait and are preempted.
ENGINE_FLAGS = ("--num-blocks", "64", "--max-model-len", "256", "--max-num-seqs", "16", "--fake-grammars")
ENGINE_FLAGS += ("--fake-bytes", "--no-fake-poisons")
_FAULT = re.compile(r" (WARNING|ERROR|CRITICAL) |Traceback")
# gRPC's own, one for each method.
_WAITS_FOR_A_CALL = "AioServer._request"
# All 0 in an engine that has nothing to do and holds nothing.
IDLE_METRICS = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "grammars_pending")


def write_model(directory: Path) -> str:
    """Tokenizer and chat template of the fake model."""
    model_dir = directory / "model"
    model_dir.mkdir()
    (model_dir / "chat_template.jinja").write_text(TEMPLATE)
    return str(write_model_dir(model_dir, byte_level_backend(), config={"eos_token_id": 0}))


class FuzzedStack:
    """Both halves, and the log of the frontend."""

    def __init__(self, engine: RunningEngine, frontend: RunningFrontend, log: pytest.LogCaptureFixture) -> None:
        self.engine = engine
        self.frontend = frontend
        self._log = log
        # An engine that is not ready yet is worth a warning.
        log.clear()
        self._tasks = asyncio.all_tasks()
        self._first_handle = self._next_handle()
        self._num_drawn = 0

    @property
    def http_port(self) -> int:
        return self.frontend.process._settings.http_port

    async def check_unharmed(self) -> None:
        """Idle to the last block, nothing left, nothing complained of, and still answering."""
        await self._check_answers()
        await self.frontend.wait_idle()
        async with asyncio.timeout(30):
            while not (self._engine_is_idle() and self._is_counted()):
                await self._check_answers()
        self._check_frontend()
        await self._check_tasks()
        complaints = [record for record in self._log.records if record.levelno >= logging.WARNING]
        assert complaints == [], complaints
        assert [line for line in self.engine.log if _FAULT.search(line)] == []
        assert self.engine.process.poll() is None

    def _is_counted(self) -> bool:
        """Every RPC that was begun has ended; watching health is one without an end."""
        started, handled = (self.samples(name, "grpc_method") for name in ("rpcs_started", "rpcs_handled"))
        return all(handled[method] == number for method, number in started.items() if "Health" not in method)

    async def _check_answers(self) -> None:
        answer = await self.frontend.generation.Generate(request(), timeout=30)
        assert answer.usage.completion_tokens == 4
        message = chat_service_pb2.Message(
            role=chat_service_pb2.ROLE_USER, content=[chat_service_pb2.ContentPart(text="hello")]
        )
        await self.frontend.chat.Chat(chat_service_pb2.ChatRequest(messages=[message]), timeout=30)
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{self.http_port}", timeout=30) as http:
            response = await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4})
        assert response.status_code == 200

    def _engine_is_idle(self) -> bool:
        return all(self.engine.metric(rf"{name}\{{.*\}}") == 0 for name in IDLE_METRICS)

    def _check_frontend(self) -> None:
        frontend = self.frontend
        assert frontend.maps == (0, 0)
        assert frontend.process.frontend.num_in_flight == 0
        assert frontend.process.frontend.pool.num_routes == 0
        assert frontend.metric("requests_in_flight", client_class="other") == 0
        for stage in ("detokenize", "logprobs"):
            assert frontend.metric("output_processing_errors_total", stage=stage) == 0

    def num_submitted_choices(self) -> int:
        """Sent to the engine since the start; each has a handle of its own."""
        self._num_drawn += 1
        return self._next_handle() - self._first_handle - self._num_drawn

    def num_finished_choices(self) -> int:
        """Counted as ended, for whatever reason; those that an engine had."""
        by_engine = self.samples("requests_finished", "engine_id")
        return round(sum(count for engine_id, count in by_engine.items() if engine_id))

    def _next_handle(self) -> int:
        [handle] = self.frontend.process.frontend.pool.draw_handles(1)
        return handle

    def samples(self, name: str, label: str) -> dict[str, float]:
        """A counter of the frontend by one of its labels."""
        found: dict[str, float] = {}
        for metric in self.frontend.process.metrics.registry.collect():
            if metric.name == f"stepwire_frontend_{name}":
                for sample in metric.samples:
                    key = sample.labels[label]
                    found[key] = found.get(key, 0) + sample.value
        return found

    async def _check_tasks(self) -> None:
        """Those of ended calls need some turns of the loop to go."""
        try:
            async with asyncio.timeout(30):
                while self._new_tasks():
                    await asyncio.wait(self._new_tasks(), timeout=0.1)
        except TimeoutError:
            raise AssertionError(f"tasks are left: {self._new_tasks()}") from None

    def _new_tasks(self) -> set[asyncio.Task[object]]:
        new = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        return {task for task in new if _WAITS_FOR_A_CALL not in repr(task)}


@asynccontextmanager
async def fuzzed_stack(
    directory: Path, log: pytest.LogCaptureFixture, **settings: object
) -> AsyncIterator[FuzzedStack]:
    """Serving; `settings` are the frontend's."""
    options = {
        "cache_dir": directory / "cache",
        "tokenizer": write_model(directory),
        "http_port": free_port(),
        **settings,
    }
    with running_engine(*ENGINE_FLAGS) as engine:
        async with running_frontend(f"127.0.0.1:{engine.port}", **options) as frontend:
            await frontend.wait_for_health(SERVING)
            yield FuzzedStack(engine, frontend, log)
