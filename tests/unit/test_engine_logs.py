"""What the log of an engine has about requests: nothing for steps and tokens, and the trace with every line."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from engine_core.input_thread import InputThread
from engine_core.output_queue import OutputQueue
from engine_core.request_traces import RequestTraces
from engine_core.session import Session
from engine_core.structured_output.grammar_state import GrammarState
from engine_core.wire import RECEIVED_KINDS, SENT_KINDS
from fakes.looped_engine import LoopedEngine
from stepwire import token_array, tracing
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.stream_meter import StreamMeter

TRACE_ID = "ab" * 16
TRACEPARENT = f"00-{TRACE_ID}-{'cd' * 8}-00"


def test_the_log_grows_with_neither_steps_nor_tokens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine = LoopedEngine()
    engine.add(1, max_tokens=50)
    engine.run()
    assert len(engine.tokens[1]) == 50
    assert [record.name for record in caplog.records if record.name != "engine_core.startup"] == []


def receive(*requests: pb.EngineCoreRequest) -> LoopedEngine:
    engine = LoopedEngine()
    outbox = OutputQueue(lambda: 0.0).attach("s")
    session = Session("s", "client", outbox, RequestTraces(tracing.WallClock()))
    frames = iter([pb.ConnectRequest(add=pb.AddRequests(requests=requests))])
    InputThread(engine.proc, session, frames, StreamMeter(SENT_KINDS, RECEIVED_KINDS)).run()
    return engine


@pytest.mark.parametrize(("traceparent", "trace_id"), [(TRACEPARENT, TRACE_ID), ("", None), ("nonsense", None)])
def test_a_line_about_a_broken_request_has_its_id_and_its_trace(
    caplog: pytest.LogCaptureFixture, traceparent: str, trace_id: str | None
) -> None:
    receive(pb.EngineCoreRequest(handle=1, request_id="r7", traceparent=traceparent, prompt_token_ids=b"odd"))
    (line,) = caplog.records
    assert line.getMessage() == "a request could not be decoded"
    assert (line.request_id, getattr(line, "trace_id", None)) == ("r7", trace_id)


def test_a_request_knows_what_its_lines_carry() -> None:
    sampling = pb.EngineSamplingParams(top_p=1, repetition_penalty=1)
    plain = {"prompt_token_ids": token_array.pack([1]), "max_tokens": 1, "sampling": sampling}
    engine = receive(
        pb.EngineCoreRequest(handle=1, request_id="r7", traceparent=TRACEPARENT, **plain),
        pb.EngineCoreRequest(handle=2, request_id="r8", **plain),
    )
    added = engine.proc.input_queue.get().requests
    assert [request.log_fields for request in added] == [
        {"request_id": "r7", "trace_id": TRACE_ID},
        {"request_id": "r8"},
    ]


def test_a_grammar_that_fails_says_whose_it_was(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> bool:
        raise RuntimeError("broken")

    state = GrammarState(("s", 1), [], [], lambda key: None, {"request_id": "r7", "trace_id": TRACE_ID})
    state._matcher = SimpleNamespace(accept_token=refuse)
    assert not state.accept(3)
    (line,) = caplog.records
    assert (line.request_id, line.trace_id) == ("r7", TRACE_ID)
