"""The outbox: order kept, adds of one tick in one frame, large prompts in several."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from frontend.engine_client.outbox import MAX_ADD_FRAME_BYTES, NewRequest, Outbox
from stepwire.engine.v1 import engine_core_pb2 as pb


def request(handle: int, num_bytes: int = 100) -> NewRequest:
    """One whose message has nearly this size."""

    def fill(message: pb.EngineCoreRequest, handle: int, now: float) -> None:
        message.handle = handle
        message.sampling.allowed_token_ids.extend([1] * (num_bytes - 50))

    return NewRequest(handle, num_bytes, fill, {})


def handles(outbox: Outbox) -> list[list[int]]:
    """Those of each frame."""
    return [[add.handle for add in frame.add.requests] for frame in outbox.take()]


def test_adds_share_a_frame_and_aborts_stay_behind_them():
    outbox = Outbox()
    outbox.add(request(1))
    outbox.add(request(2))
    outbox.abort([1], pb.ABORT_REASON_DEADLINE)
    outbox.add(request(3))
    frames = list(outbox.take())
    assert [frame.WhichOneof("message") for frame in frames] == ["add", "abort", "add"]
    assert [add.handle for add in frames[0].add.requests] == [1, 2]


def test_large_requests_do_not_add_up_to_a_refused_frame():
    outbox = Outbox()
    for handle in range(1, 8):
        outbox.add(request(handle, MAX_ADD_FRAME_BYTES // 3))
    frames = list(outbox.take())
    assert [[add.handle for add in frame.add.requests] for frame in frames] == [[1, 2, 3], [4, 5, 6], [7]]
    assert all(frame.ByteSize() <= MAX_ADD_FRAME_BYTES for frame in frames)


def test_a_request_above_the_limit_has_a_frame_of_its_own():
    outbox = Outbox()
    for handle, size in ((1, 100), (2, MAX_ADD_FRAME_BYTES + 1), (3, 100)):
        outbox.add(request(handle, size))
    assert handles(outbox) == [[1], [2], [3]]


def test_a_request_becomes_a_message_only_with_its_frame():
    outbox = Outbox()
    made: list[int] = []
    for handle in range(3):
        outbox.add(NewRequest(handle, MAX_ADD_FRAME_BYTES, lambda message, handle, now: made.append(handle), {}))
    assert made == []
    for num_frames, _ in enumerate(outbox.take(), start=1):
        assert made == list(range(num_frames))


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
