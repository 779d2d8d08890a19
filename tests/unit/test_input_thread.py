"""The input thread when its stream ends at the worst moment, made to happen instead of waited for."""

from __future__ import annotations

import queue
from unittest.mock import Mock

from engine_core.core_proc import EngineCoreProc
from engine_core.input_thread import InputThread
from engine_core.messages import Add
from engine_core.output_queue import OutputQueue
from engine_core.session import Session
from running_engine import engine_request
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.stream_meter import StreamMeter


def make_session() -> Session:
    return Session("session", "client", OutputQueue(lambda: 0.0).attach("session"))


def make_proc() -> Mock:
    proc = Mock(spec=EngineCoreProc)
    proc.input_queue = queue.SimpleQueue()
    proc.core = Mock()
    proc.core.clock.return_value = 0.0
    proc.core.preprocess_add_request.return_value = None
    return proc


def add(*handles: int) -> pb.ConnectRequest:
    return pb.ConnectRequest(add=pb.AddRequests(requests=[engine_request(handle, [5]) for handle in handles]))


def test_requests_hashed_while_their_stream_closed_are_aborted_behind_their_add() -> None:
    session, proc = make_session(), make_proc()
    left_behind: list[object] = []

    def close_meanwhile(request: object) -> None:
        left_behind.extend(session.close())

    proc.core.preprocess_add_request.side_effect = close_meanwhile
    proc.abort.side_effect = lambda keys, reason: proc.input_queue.put((keys, reason))
    InputThread(proc, session, iter([add(1)]), StreamMeter((), ())).run()
    assert left_behind == [("session", 1)]
    first, second = proc.input_queue.get_nowait(), proc.input_queue.get_nowait()
    assert isinstance(first, Add)
    assert second == ([("session", 1)], "client_cancelled")


def test_nothing_enters_the_engine_from_a_closed_stream() -> None:
    session, proc = make_session(), make_proc()
    session.close()
    InputThread(proc, session, iter([add(1, 2)]), StreamMeter((), ())).run()
    assert proc.input_queue.empty()


def test_a_live_stream_aborts_nothing() -> None:
    session, proc = make_session(), make_proc()
    InputThread(proc, session, iter([add(1, 2)]), StreamMeter((), ())).run()
    assert [request.key[1] for request in proc.input_queue.get_nowait().requests] == [1, 2]
    proc.abort.assert_not_called()
