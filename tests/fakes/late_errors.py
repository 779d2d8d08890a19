"""Errors that come when a caller has got a part of its answer.

An error drops what the frontend has not written yet, so an engine that failed right behind its token would leave to
chance how much the caller has got.
"""

from __future__ import annotations

from fakes.fake_engine import FakeEngine
from running_frontend import RunningFrontend
from stepwire.engine.v1 import engine_core_pb2
from stepwire.v1 import common_pb2


def halt_after(engine: FakeEngine, num_tokens: int, request_id: str = "") -> None:
    """No more steps when a request, this one or any, has so many tokens."""

    def halt(add: engine_core_pb2.EngineCoreRequest, index: int) -> None:
        if index == num_tokens - 1 and request_id in ("", add.request_id):
            engine.may_step.clear()

    engine.fail = halt


async def written(engine: FakeEngine, frontend: RunningFrontend, num_tokens: int, request_id: str = "") -> None:
    """Return when the caller has got all that `halt_after` lets the engine make."""
    await engine.wait_until(lambda: not engine.may_step.is_set())
    await frontend.wait_for_tokens(num_tokens, request_id)


async def fail_after(
    engine: FakeEngine,
    frontend: RunningFrontend,
    num_tokens: int,
    error: common_pb2.EngineError,
    request_id: str = "",
) -> None:
    """End a request that comes with an error behind so many tokens; the others go on."""
    halt_after(engine, num_tokens, request_id)
    await written(engine, frontend, num_tokens, request_id)
    engine.fail = lambda add, index: error if request_id in ("", add.request_id) else None
    engine.may_step.set()
