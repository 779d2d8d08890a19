"""Frames of bounded size: every token, row, event and end arrives once and in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_core.output_frames import cut, size_of
from engine_core.output_queue import coalesce
from engine_core.scheduler.output import (
    EngineCoreOutput,
    EngineCoreOutputs,
    Finish,
    FinishReason,
    PrefillStats,
    SchedulerStats,
)
from engine_core.scheduler.request import EventType
from fakes.fake_logprobs import fake_rows

KEY = ("s", 1)
LIMIT = 4000


def batch(*outputs: EngineCoreOutput) -> EngineCoreOutputs:
    return EngineCoreOutputs(7, 1.0, list(outputs), SchedulerStats(num_running=1))


def test_a_small_batch_is_one_frame_as_it_is() -> None:
    whole = batch(EngineCoreOutput(KEY, [1]))
    assert list(cut(whole, LIMIT)) == [whole]


def test_rows_of_a_prompt_come_before_tokens_events_first_and_the_end_last() -> None:
    output = EngineCoreOutput(
        KEY,
        [1, 2],
        Finish(FinishReason.LENGTH),
        [(EventType.SCHEDULED, 0.0)],
        PrefillStats(100, 0),
        fake_rows([1, 2], 100, 3),
        fake_rows(range(1, 100), 1, 20),
    )
    frames = list(cut(batch(output), LIMIT))
    assert len(frames) > 3
    assert [frame.stats is not None for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert {(frame.step, frame.time) for frame in frames} == {(7, 1.0)}
    pieces = [piece for frame in frames for piece in frame.outputs]
    assert (pieces[0].events, pieces[0].prefill) == (output.events, output.prefill)
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + [output.finish]
    assert (pieces[-1].new_token_ids, pieces[-1].prompt_logprobs) == ([1, 2], None)


def test_a_row_above_the_limit_still_goes() -> None:
    output = EngineCoreOutput(KEY, prompt_logprobs=fake_rows([1, 2], 1, 2000))
    assert [frame.outputs[0].prompt_logprobs.num_rows for frame in cut(batch(output), LIMIT)] == [1, 1]


def test_vectors_count_and_are_never_cut() -> None:
    finish = Finish(FinishReason.STOP)
    sizes = {("s", 1): 3000, ("s", 2): 3000, ("s", 3): 9000}
    vectors = [EngineCoreOutput(key, finish=finish, pooled=bytes(size)) for key, size in sizes.items()]
    frames = list(cut(batch(*vectors), LIMIT))
    assert [[piece.pooled for piece in frame.outputs] for frame in frames] == [[one.pooled] for one in vectors]
    assert size_of(vectors[0]) > 3000


def test_a_vector_survives_the_merge_with_what_came_before_it() -> None:
    queued = EngineCoreOutput(KEY, events=[(EventType.QUEUED, 0.0)])
    done = EngineCoreOutput(KEY, finish=Finish(FinishReason.STOP), pooled=b"1234")
    [merged] = coalesce([batch(queued), batch(done)])
    assert [(one.pooled, one.events, one.finish) for one in merged.outputs] == [(b"1234", queued.events, done.finish)]


@st.composite
def outputs(draw: st.DrawFn, handle: int) -> EngineCoreOutput:
    num_tokens, num_prompt = draw(st.integers(0, 60)), draw(st.integers(0, 60))
    has_rows = draw(st.booleans())
    token_ids = list(range(num_tokens))
    return EngineCoreOutput(
        ("s", handle),
        token_ids,
        logprobs=fake_rows(token_ids, 9, draw(st.just(4))) if has_rows and token_ids else None,
        prompt_logprobs=fake_rows(range(num_prompt), 1, 7) if num_prompt else None,
        finish=draw(st.sampled_from([None, Finish(FinishReason.STOP)])),
        events=draw(st.sampled_from([[], [(EventType.QUEUED, 0.0)]])),
    )


@given(st.data(), st.integers(300, 5000))
def test_frames_are_small_and_merge_to_the_batch_they_came_from(data: st.DataObject, limit: int) -> None:
    whole = batch(*(data.draw(outputs(handle)) for handle in range(data.draw(st.integers(1, 4)))))
    frames = list(cut(whole, limit))
    assert all(sum(map(size_of, frame.outputs)) <= limit for frame in frames)
    assert coalesce(list(frames)) == [whole]
