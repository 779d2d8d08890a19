"""Utility calls on the frontend's side: every call ends, and what comes too late disturbs nobody."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from frontend.engine_client.outbox import Outbox
from frontend.engine_client.utility_calls import UtilityCalls, is_error
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.errors import EngineDeadError
from stepwire.v1 import admin_service_pb2, control_pb2
from stepwire_client import cli_admin


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


def sent(outbox: Outbox) -> list[pb.UtilityCall]:
    return [frame.utility for frame in outbox.take()]


async def started(calls: UtilityCalls, outbox: Outbox, args, timeout_s: float | None = None) -> asyncio.Task:
    task = asyncio.create_task(calls.call(outbox, args, timeout_s))
    await asyncio.sleep(0)
    return task


async def test_arguments_travel_as_the_operation_they_belong_to(outbox: Outbox) -> None:
    calls = UtilityCalls()
    everything = [
        field.message_type._concrete_class() for field in pb.UtilityCall.DESCRIPTOR.oneofs_by_name["call"].fields
    ]
    tasks = [await started(calls, outbox, args) for args in everything]
    kinds = [call.WhichOneof("call") for call in sent(outbox)]
    assert kinds == [field.name for field in pb.UtilityCall.DESCRIPTOR.oneofs_by_name["call"].fields]
    calls.fail_all(EngineDeadError("gone"))
    assert all(is_error(outcome) for outcome in [await task for task in tasks])


async def test_results_find_their_calls_in_any_order(outbox: Outbox) -> None:
    calls = UtilityCalls()
    first = await started(calls, outbox, control_pb2.ResumeArgs())
    second = await started(calls, outbox, control_pb2.IsPausedArgs(), timeout_s=30.0)
    one, two = sent(outbox)
    assert (one.timeout_ms, two.timeout_ms) == (0, 29_900)
    calls.settle(pb.UtilityResult(call_id=two.call_id, is_paused={"paused": True}))
    calls.settle(pb.UtilityResult(call_id=one.call_id, error={"reason": "PAUSE_PENDING"}))
    assert (await second).paused
    assert (await first).reason == "PAUSE_PENDING"


@pytest.mark.regression("utility pending at death")
async def test_a_death_is_the_answer_of_every_pending_call(outbox: Outbox) -> None:
    calls = UtilityCalls()
    tasks = [await started(calls, outbox, control_pb2.ResumeArgs()) for _ in range(2)]
    calls.fail_all(EngineDeadError("the engine died: boom", cause="STEP_FAILED", cause_type="RuntimeError"))
    for error in [await task for task in tasks]:
        assert (error.reason, error.message, error.cause_type) == (
            "ENGINE_DEAD", "the engine died: boom", "RuntimeError",
        )  # fmt: skip


async def test_an_engine_that_says_nothing_is_not_waited_for_longer_than_the_caller_waits(outbox: Outbox) -> None:
    error = await UtilityCalls().call(outbox, control_pb2.ResumeArgs(), timeout_s=0.06)
    assert error.reason == "DEADLINE"
    (call,) = sent(outbox)
    # 0 would mean: no limit.
    assert call.timeout_ms == 1


@pytest.mark.regression("utility future cancelled")
async def test_a_result_after_the_end_of_its_call_is_dropped(outbox: Outbox) -> None:
    calls = UtilityCalls()
    cancelled = await started(calls, outbox, control_pb2.ResumeArgs())
    (call,) = sent(outbox)
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    calls.settle(pb.UtilityResult(call_id=call.call_id, resume={}))
    next_one = await started(calls, outbox, control_pb2.ResumeArgs())
    (next_call,) = sent(outbox)
    assert next_call.call_id != call.call_id
    calls.settle(pb.UtilityResult(call_id=next_call.call_id, resume={"resumed": True}))
    calls.settle(pb.UtilityResult(call_id=next_call.call_id, resume={}))
    assert (await next_one).resumed


def test_every_rpc_of_the_admin_service_has_a_command() -> None:
    methods = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].methods_by_name
    apps = [cli_admin.app, *(group.typer_instance for group in cli_admin.app.registered_groups)]
    commands = {command.callback.__name__.replace("_", "") for app in apps for command in app.registered_commands}
    shorter = {"getdrainstatus": "drainstatus", "getweightversion": "weightversion"}
    assert commands == {shorter.get(name.lower(), name.lower()) for name in methods}
