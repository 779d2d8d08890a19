"""The owner of an engine is killed without a chance to say so (engine-semantics.md §14, row 1)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from fakes.fake_executor import SLOW_TOKEN
from running_engine import TIMEOUT_S, RunningEngine, engine_request, running_engine
from stepwire.engine.v1 import engine_core_pb2 as pb

FLAGS = ("--owner", "parent", "--drain-timeout-s", "600")


@contextmanager
def owned_engine(*flags: str) -> Iterator[RunningEngine]:
    """An engine whose parent is `engine.process`; nothing of it is left behind, whatever the test finds."""
    with running_engine(*FLAGS, *flags, module="fakes.engine_owner") as owner:
        pid = pid_of_engine(owner)
        try:
            yield owner
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pid_of_engine(owner: RunningEngine) -> int:
    """As the owner tells it, which may come behind what the engine says itself."""
    give_up, pause = time.monotonic() + TIMEOUT_S, threading.Event()
    while (found := re.search(r"engine has pid (\d+)", "".join(owner.log))) is None:
        assert time.monotonic() < give_up, owner.log
        pause.wait(0.01)
    return int(found[1])


def has_ended(owner: RunningEngine) -> bool:
    """Owner and engine share the log: it ends when the last of the two is gone, and with it all memory."""
    owner._reader.join(TIMEOUT_S)
    return not owner._reader.is_alive()


@pytest.mark.regression(1)
def test_a_killed_owner_ends_the_engine_that_loads() -> None:
    with owned_engine("--fake-load-s", "600") as owner:
        owner.process.kill()
        assert has_ended(owner)


@pytest.mark.regression(1)
def test_a_killed_owner_ends_the_engine_that_serves() -> None:
    with owned_engine() as owner:
        stream = owner.connect()
        stream.add(engine_request(1, [SLOW_TOKEN] * 3, 4000))
        stream.until(lambda _: stream.tokens.get(1))
        owner.process.kill()
        assert stream.rest() is grpc.StatusCode.OK
        assert stream.finishes[1].reason == pb.ENGINE_FINISH_REASON_ABORTED
        assert has_ended(owner)
        assert "clean exit" in "".join(owner.log)
