"""Every row of the error table that a client can see, through a real socket, with the client of every language.

The reply must have the code, the reason and the details of its row, and the runner must be able to go on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from conformance import error_situations as situations
from conformance import runners
from conformance.checks import token_ids_of
from conformance.error_situations import Situation
from conformance.error_worlds import OUTSIDER, POOR, RICH, World, world_of
from conformance.runners import Reply, Runner
from stepwire.grpc_errors import REASONS

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TEXT = {"text": "a b", "stop": {"max_tokens": 4}}


@dataclass(frozen=True)
class Row:
    """One line of the table: how it comes about, and what the client gets."""

    code: str
    reason: str
    situation: Situation = situations.as_it_is
    request: Mapping[str, Any] = field(default_factory=dict)
    method: str = "GenerationService/GenerateStream"
    token: str = ""
    world: str = "plain"
    # What the reply has to have.
    is_retryable: bool = False
    has_delay: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    quota: tuple[str, ...] = ()
    words: str = ""


LONG = {"text": "a b", "stop": {"max_tokens": 1000, "ignore_eos": True}, "output": {"token_ids": True}}
ENDLESS = {"text": "hello " * 60, "stop": {"max_tokens": 90_000_000}}
NOT_STARTED = {"request_id": "row", "tokens_emitted": "0"}
STARTED = {"request_id": "row", "tokens_emitted": str(situations.NUM_TOKENS_BEFORE)}

ROWS = {
    "a bad field": Row(
        "INVALID_ARGUMENT", "FIELD_INVALID", request={"sampling": {"top_p": 7}}, fields=("sampling.top_p",)
    ),
    "a prompt over the context": Row(
        "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED", request={"text": "word " * 5000}, fields=("text",), words="4096"
    ),
    "a constraint that does not compile": Row(
        "INVALID_ARGUMENT",
        "GRAMMAR_INVALID",
        situations.refused_by_the_engine("GRAMMAR_INVALID", 3),
        metadata=NOT_STARTED,
    ),
    "an unknown model": Row(
        "NOT_FOUND", "MODEL_NOT_FOUND", request={"model": "other"}, fields=("model",), words="other"
    ),
    "a request id in flight": Row(
        "ALREADY_EXISTS",
        "DUPLICATE_REQUEST",
        situations.same_id_in_flight,
        metadata={"request_id": "row", "tokens_emitted": "0"},
    ),
    "a template of the caller's own": Row(
        "PERMISSION_DENIED",
        "CHAT_TEMPLATE_NOT_ALLOWED",
        method="ChatService/ChatStream",
        request={"messages": [{"role": "ROLE_USER", "content": [{"text": "a"}]}], "chat_template": "x"},
        fields=("chat_template",),
    ),
    "a full engine": Row(
        "RESOURCE_EXHAUSTED",
        "QUEUE_FULL",
        situations.refused_by_the_engine("QUEUE_FULL", 8),
        is_retryable=True,
        has_delay=True,
        metadata=NOT_STARTED,
    ),
    "a full frontend": Row(
        "RESOURCE_EXHAUSTED",
        "QUEUE_FULL",
        situations.all_places_taken,
        token=RICH,
        world="guarded",
        is_retryable=True,
        has_delay=True,
    ),
    "a rate that is used up": Row(
        "RESOURCE_EXHAUSTED",
        "RATE_LIMITED",
        situations.until_it_is_refused,
        token=POOR,
        world="guarded",
        is_retryable=True,
        has_delay=True,
        quota=("token:poor",),
    ),
    "no token": Row("UNAUTHENTICATED", "UNAUTHENTICATED", world="guarded"),
    "a token for another model": Row(
        "PERMISSION_DENIED", "PERMISSION_DENIED", token=OUTSIDER, world="guarded", words="fake-model"
    ),
    "a request that never fits the KV cache": Row(
        "FAILED_PRECONDITION", "KV_CAPACITY", situations.refused_by_the_engine("KV_CAPACITY", 9), metadata=NOT_STARTED
    ),
    "an engine that drains": Row(
        "UNAVAILABLE", "DRAINING", situations.engine_drains, is_retryable=True, has_delay=True
    ),
    "an engine that has not started": Row(
        "UNAVAILABLE", "ENGINE_STARTING", world="starting", is_retryable=True, has_delay=True
    ),
    "an engine that dies before the first token": Row(
        "UNAVAILABLE",
        "ENGINE_DEAD",
        situations.engine_dies_before_the_first_token,
        is_retryable=True,
        has_delay=True,
        metadata=NOT_STARTED | {"engine_id": "fake-0", "cause_type": "ValueError"},
        words="out of luck",
    ),
    "an engine that is gone": Row(
        "UNAVAILABLE", "ENGINE_DEAD", situations.engine_is_gone, is_retryable=True, has_delay=True
    ),
    "an engine that dies after tokens": Row(
        "UNAVAILABLE", "ENGINE_DEAD", situations.engine_dies_after_tokens, request=LONG, metadata=STARTED
    ),
    "a request that fails alone": Row(
        "INTERNAL",
        "REQUEST_FAILED",
        situations.failed_in_the_engine("REQUEST_FAILED", 13, 0),
        is_retryable=True,
        metadata=NOT_STARTED,
    ),
    "a request that fails alone after tokens": Row(
        "INTERNAL",
        "REQUEST_FAILED",
        situations.failed_in_the_engine("REQUEST_FAILED", 13, situations.NUM_TOKENS_BEFORE),
        request=LONG,
        metadata=STARTED,
    ),
    "a token that the grammar does not allow": Row(
        "INTERNAL",
        "GRAMMAR_VIOLATION",
        situations.failed_in_the_engine("GRAMMAR_VIOLATION", 13, situations.NUM_TOKENS_BEFORE),
        request=LONG,
        metadata=STARTED,
    ),
    "output that can not be processed": Row(
        "INTERNAL",
        "OUTPUT_PROCESSING",
        situations.output_can_not_be_processed,
        is_retryable=True,
        metadata={"request_id": "row"},
    ),
    "a fault of the frontend": Row(
        "INTERNAL", "INTERNAL", situations.input_can_not_be_processed, is_retryable=True, metadata={"request_id": "row"}
    ),
    "too long in the queue": Row(
        "DEADLINE_EXCEEDED",
        "QUEUE_TIMEOUT",
        situations.steps_do_not_come,
        request={"queue_timeout_ms": 50},
        is_retryable=True,
        metadata=NOT_STARTED,
    ),
    "a deadline in the engine": Row(
        "DEADLINE_EXCEEDED", "DEADLINE", situations.failed_in_the_engine("DEADLINE", 4, 0), metadata=NOT_STARTED
    ),
    "an abort before the engine has the request": Row(
        "CANCELLED", "CANCELLED", situations.aborted_on_the_way_to_the_engine
    ),
    "an option that the engine lacks": Row(
        "UNIMPLEMENTED", "UNSUPPORTED_FEATURE", request={"priority": 1}, fields=("priority",), words="priority"
    ),
}

ADMIN = "operations on engines, admin port only: test_admin_errors"
ENGINES = "between frontend and engine; a client of the public port sees ENGINE_STARTING or ENGINE_DEAD"
NOT_SEEN = {
    "SLOW_CLIENT": "has a test of its own here",
    "PROTOCOL_VIOLATION": ENGINES,
    "PROTOCOL_VERSION": ENGINES,
    "MODEL_MISMATCH": ENGINES,
    "TOKENIZER_MISMATCH": ENGINES,
    "TOKENIZER_UNUSABLE": ENGINES,
    "WEIGHTS_MISMATCH": ENGINES,
    "ENGINE_ID_TAKEN": ENGINES,
    "SESSION_REPLACED": ENGINES,
    "ENGINE_NOT_FOUND": ADMIN,
    "ENGINE_PAUSED": ADMIN,
    "PAUSE_PENDING": ADMIN,
    "ENGINE_SLEEPING": ADMIN,
    "ENGINE_NOT_PAUSED": ADMIN,
    "WEIGHT_UPDATE_OPEN": ADMIN,
    "WEIGHT_UPDATE_UNKNOWN": ADMIN,
    "WEIGHT_UPDATE_INCOMPLETE": ADMIN,
    "WEIGHTS_UNUSABLE": ADMIN,
    "PROFILING_OFF": ADMIN,
    "PROFILE_RUNNING": ADMIN,
    "PROFILE_NOT_RUNNING": ADMIN,
    "UTILITY_FAILED": ADMIN,
}


class Worlds:
    """The worlds that the rows have asked for so far; starting one and its runners costs more than a row."""

    def __init__(self, exit_stack: AsyncExitStack, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._exit_stack = exit_stack
        self._tmp_path_factory = tmp_path_factory
        self._worlds: dict[str, World] = {}

    async def get(self, kind: str) -> World:
        if kind not in self._worlds:
            world = world_of(kind, self._tmp_path_factory.mktemp(kind))
            self._worlds[kind] = await self._exit_stack.enter_async_context(world)
        return self._worlds[kind]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worlds(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worlds]:
    async with AsyncExitStack() as exit_stack:
        yield Worlds(exit_stack, tmp_path_factory)


@pytest.mark.parametrize("runner_name", runners.RUNNERS)
@pytest.mark.parametrize("name", ROWS)
async def test_row(worlds: Worlds, name: str, runner_name: str):
    row = ROWS[name]
    world = await worlds.get(row.world)
    reply = await made(world, world.runner(runner_name), row)
    await world.settle()

    assert (reply.code, reply.reason) == (row.code, row.reason), reply.message
    assert reply.error_metadata["retryable"] == str(row.is_retryable).lower()
    assert {key: reply.error_metadata.get(key) for key in row.metadata} == row.metadata
    assert row.words in reply.message
    assert reply.fields == list(row.fields)
    assert [violation["subject"] for violation in reply.quota_violations] == list(row.quota)
    assert (reply.retry_delay_ms > 0) == row.has_delay
    assert (reply.pushback_ms or 0) == reply.retry_delay_ms
    # A client that resumes sends what it got: no token may be missing from it.
    if "output" in row.request:
        assert len(token_ids_of(reply)) == int(reply.error_metadata["tokens_emitted"])


async def made(world: World, runner: Runner, row: Row) -> Reply:
    """The reply of a call in the situation of its row."""
    base = {} if row.method.startswith("Chat") else TEXT
    request = {"request_id": "row", **base, **row.request}
    options = {"metadata": {"authorization": f"Bearer {row.token}"}} if row.token else {}
    return await row.situation(world, lambda: world.call(runner, row.method, request, **options))


@pytest.mark.parametrize("runner_name", runners.RUNNERS)
async def test_a_client_that_does_not_read_is_cut(worlds: Worlds, runner_name: str):
    world = await worlds.get("impatient")
    runner = world.runner(runner_name)
    row = Row("RESOURCE_EXHAUSTED", "SLOW_CLIENT", situations.client_is_stopped(runner.process_id), ENDLESS)
    reply = await made(world, runner, row)
    await world.settle()
    assert (reply.code, reply.reason) == (row.code, row.reason)
    # What it has is to be resumed, not repeated.
    assert reply.error_metadata["retryable"] == "false"
    assert int(reply.error_metadata["tokens_emitted"]) > 0


async def test_the_rows_are_the_table():
    seen = {row.reason for row in ROWS.values()}
    assert seen | set(NOT_SEEN) == set(REASONS)
    assert not seen & set(NOT_SEEN)
