"""Frontends with a fake engine in which errors are provoked, each in the test's event loop, with runners to call it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from conformance import runners
from conformance.runners import Reply, Runner
from fakes.fake_engine import FakeEngine
from fakes.small_tokenizer import byte_level_backend, write_model_dir
from running_frontend import NOT_SERVING, SERVING, RunningFrontend, running_frontend
from stepwire.v1 import common_pb2

RICH, POOR, OUTSIDER = "rich-0123456789abcdef", "poor-0123456789abcdef", "outsider-0123456789abcdef"
TOKENS = f"""
[tokens.rich]
token = "{RICH}"
[tokens.poor]
token = "{POOR}"
requests_per_minute = 1
[tokens.outsider]
token = "{OUTSIDER}"
models = ["another"]
"""
# So little that a client that is stopped exceeds it as soon as the sockets are full.
SLOW_CLIENT_BYTES = 20_000


class World:
    """One frontend, its engine, and the runners that were asked for so far."""

    def __init__(self, engine: FakeEngine, frontend: RunningFrontend, exit_stack: AsyncExitStack) -> None:
        self.engine = engine
        self.frontend = frontend
        self._exit_stack = exit_stack
        self._runners: dict[str, Runner] = {}

    def runner(self, name: str) -> Runner:
        if name not in self._runners:
            runner = runners.start(name, f"127.0.0.1:{self.frontend.process.port}")
            self._runners[name] = self._exit_stack.enter_context(runner)
        return self._runners[name]

    async def call(self, runner: Runner, method: str, request: dict[str, Any], **options: Any) -> Reply:
        return await asyncio.to_thread(runner.call, method, request, **options)

    async def revive(self) -> None:
        """A new engine in the place of one that has died or drained."""
        await self.engine.stop()
        await self.frontend.wait_for_health(NOT_SERVING)
        self.engine.ready.state = common_pb2.ENGINE_STATE_RUNNING
        await self.engine.start(self.engine.port)
        await self.frontend.wait_for_health(SERVING)

    async def settle(self) -> None:
        """The engine as it was, and nothing in flight."""
        engine = self.engine
        engine.reject = lambda add: None
        engine.fail = lambda add, index: None
        engine.may_step.set()
        await self.frontend.wait_idle()
        await engine.wait_until(lambda: engine.num_live == 0)
        engine.aborts.clear()


@asynccontextmanager
async def world_of(kind: str, directory: Path, **more_settings: Any) -> AsyncIterator[World]:
    """`plain`; `guarded`: callers need tokens; `starting`: the engine never gets ready; `impatient`: see above."""
    settings: dict[str, Any] = {"cache_dir": directory / "cache", **more_settings}
    (directory / "model").mkdir()
    engine = FakeEngine(
        write_model_dir(directory / "model", byte_level_backend(), config={"eos_token_id": 0}), vocab_size=400
    )
    if kind == "guarded":
        (directory / "tokens.toml").write_text(TOKENS)
        settings |= {"token_file": directory / "tokens.toml", "max_concurrent_requests": 2}
    elif kind == "impatient":
        settings["slow_client_bytes"] = SLOW_CLIENT_BYTES
        engine.ready.max_model_len = engine.ready.kv_cache_tokens = 100_000_000
        engine.tokens_per_step = 1000
    elif kind == "starting":
        engine.is_loaded.clear()
    async with AsyncExitStack() as exit_stack:
        await exit_stack.enter_async_context(engine.running())
        frontend = await exit_stack.enter_async_context(running_frontend(engine.endpoint, **settings))
        if kind != "starting":
            await frontend.wait_until(lambda: frontend.process.frontend.is_serving)
        yield World(engine, frontend, exit_stack)
