"""The outbox: order kept, adds of one tick in one frame, large prompts in several."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from frontend.engine_client.outbox import MAX_ADD_FRAME_BYTES, Outbox
from stepwire.engine.v1 import engine_core_pb2 as pb


def request(handle: int, num_bytes: int = 4) -> pb.EngineCoreRequest:
    return pb.EngineCoreRequest(handle=handle, prompt_token_ids=bytes(num_bytes))


def test_adds_share_a_frame_and_aborts_stay_behind_them():
    outbox = Outbox()
    outbox.add(request(1))
    outbox.add(request(2))
    outbox.abort([1], pb.ABORT_REASON_DEADLINE)
    outbox.add(request(3))
    frames = list(outbox.take())
    assert [frame.WhichOneof("message") for frame in frames] == ["add", "abort", "add"]
    assert [add.handle for add in frames[0].add.requests] == [1, 2]


def test_large_prompts_do_not_add_up_to_a_refused_frame():
    outbox = Outbox()
    for handle in range(10):
        outbox.add(request(handle, MAX_ADD_FRAME_BYTES // 2))
    frames = list(outbox.take())
    assert [len(frame.add.requests) for frame in frames] == [2] * 5


async def test_wait_returns_only_when_there_is_something():
    outbox = Outbox()
    outbox.put(pb.ConnectRequest(ping=pb.Ping(nonce=1)))
    await outbox.wait()
    assert len(list(outbox.take())) == 1
    assert not outbox._has_items.is_set()


def test_what_is_put_while_writing_is_taken_too():
    outbox = Outbox()
    outbox.add(request(1))
    seen = []
    for frame in outbox.take():
        seen.append(frame.WhichOneof("message"))
        if len(seen) == 1:
            outbox.abort([1], pb.ABORT_REASON_CLIENT_CANCELLED)
    assert seen == ["add", "abort"]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5))))
def test_nothing_is_lost_and_no_abort_overtakes_its_add(items: list[tuple[bool, int]]):
    outbox = Outbox()
    expected = []
    for is_add, handle in items:
        if is_add:
            outbox.add(request(handle))
        else:
            outbox.abort([handle], pb.ABORT_REASON_REQUESTED)
        expected.append((is_add, handle))
    seen = []
    for frame in outbox.take():
        seen.extend((True, add.handle) for add in frame.add.requests)
        seen.extend((False, handle) for handle in frame.abort.handles)
    assert seen == expected
