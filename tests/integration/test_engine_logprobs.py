"""Log-probabilities over the engine's real stream: every byte, in frames of bounded size, for requests that may ask."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest

from fakes.fake_executor import SLOW_TOKEN, VOCAB_SIZE, next_token
from fakes.fake_logprobs import fake_rows
from running_engine import EngineStream, RunningEngine, engine_request, running_engine
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.packed_logprobs import PackedLogprobs

MAX_FRAME_BYTES = 4 * 2**20


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with running_engine("--num-blocks", "400", "--max-model-len", "-1", "--max-logprobs", "-1") as engine:
        yield engine


def unwire(message: pb.Logprobs) -> PackedLogprobs:
    return PackedLogprobs(message.width, message.token_ids, message.logprobs, message.ranks)


class Rows:
    """What came over a stream, joined by handle."""

    def __init__(self, stream: EngineStream) -> None:
        self.sampled: dict[int, list[PackedLogprobs]] = defaultdict(list)
        self.prompt: dict[int, list[PackedLogprobs]] = defaultdict(list)
        for frame in stream.frames:
            for output in frame.outputs.outputs:
                if output.HasField("logprobs"):
                    self.sampled[output.handle].append(unwire(output.logprobs))
                if output.HasField("prompt_logprobs"):
                    self.prompt[output.handle].append(unwire(output.prompt_logprobs))


def test_ready_says_how_many_may_be_asked_for(engine: RunningEngine) -> None:
    assert engine.connect().next().ready.max_logprobs == -1
    with running_engine("--num-blocks", "20", "--max-model-len", "-1") as plain:
        assert plain.connect().next().ready.max_logprobs == 20


@pytest.mark.regression(2)
def test_payloads_above_64_kib_back_to_back_arrive_byte_by_byte(engine: RunningEngine) -> None:
    """Regression checklist, row 2."""
    stream = engine.connect()
    prompts = {handle: [3 + (handle * 7 + index) % 400 for index in range(300)] for handle in range(1, 9)}
    stream.add(
        *(
            engine_request(handle, prompt, max_tokens=20, logprobs=400, prompt_logprobs=100, logprob_token_ids=[5, 6])
            for handle, prompt in prompts.items()
        )
    )
    stream.until_finished(*prompts)
    rows = Rows(stream)
    for handle, prompt in prompts.items():
        known = list(prompt)
        for _ in range(20):
            known.append(next_token(known))
        sampled, of_prompt = PackedLogprobs.join(rows.sampled[handle]), PackedLogprobs.join(rows.prompt[handle])
        assert stream.tokens[handle] == known[300:]
        assert sampled == fake_rows(known[300:], 300, 400, (5, 6))
        assert of_prompt == fake_rows(prompt[1:], 1, 100)
        assert of_prompt.num_bytes > 3 * 65536
    biggest = max(frame.ByteSize() for frame in stream.frames)
    assert biggest > 65536


def test_rows_of_a_prompt_are_cut_into_frames_of_4_mib(engine: RunningEngine) -> None:
    stream = engine.connect()
    prompt = [3 + index % 400 for index in range(1800)]
    stream.add(engine_request(1, prompt, max_tokens=2, prompt_logprobs=500), engine_request(2, [7, 8], max_tokens=30))
    stream.until_finished(1, 2)
    assert PackedLogprobs.join(Rows(stream).prompt[1]) == fake_rows(prompt[1:], 1, 500)
    sizes = [frame.ByteSize() for frame in stream.frames]
    assert max(sizes) <= MAX_FRAME_BYTES + 1024
    assert sum(sizes) > 1.5 * MAX_FRAME_BYTES
    assert (len(stream.tokens[1]), len(stream.tokens[2])) == (2, 30)


def test_requests_that_do_not_ask_stay_on_the_fast_path(engine: RunningEngine) -> None:
    stream = engine.connect()
    stream.add(
        engine_request(1, [SLOW_TOKEN] * 5, max_tokens=1500),
        engine_request(2, [SLOW_TOKEN] * 6, max_tokens=1500, logprobs=0),
    )
    # Steps whose tokens go out together are on no fast path: the first one that goes alone is waited for.
    stream.until(lambda frame: 1 in frame.outputs.handles)
    stream.abort(1, 2)
    stream.until_finished(1, 2)
    assert 2 not in {handle for frame in stream.frames for handle in frame.outputs.handles}
    assert set(Rows(stream).sampled) == {2}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprobs": 21}, "logprobs: 21 asks for 21, at most 20"),
        ({"logprobs": -1}, f"logprobs: -1 asks for {VOCAB_SIZE}, at most 20"),
        ({"prompt_logprobs": -2}, "prompt_logprobs: -2"),
        ({"logprob_token_ids": [VOCAB_SIZE]}, f"token id {VOCAB_SIZE} is outside"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids: 129 ids, at most 128"),
    ],
)
def test_what_the_operator_does_not_allow_is_refused(
    plain_stream: EngineStream, fields: dict[str, object], words: str
) -> None:
    handle = len(plain_stream.finishes) + 1
    plain_stream.add(engine_request(handle, [10] * 5, **fields))
    plain_stream.until_finished(handle)
    finish = plain_stream.finishes[handle]
    assert (finish.reason, finish.error.reason) == (pb.ENGINE_FINISH_REASON_REJECTED, "FIELD_INVALID")
    assert words in finish.error.message


@pytest.fixture(scope="module")
def plain_stream() -> Iterator[EngineStream]:
    with running_engine("--num-blocks", "64", "--max-model-len", "-1") as engine:
        yield engine.connect()


def test_too_many_entries_for_one_prompt_are_refused(engine: RunningEngine) -> None:
    stream = engine.connect()
    stream.add(engine_request(1, [10] * 2000, prompt_logprobs=-1))
    stream.until_finished(1)
    assert f"{2000 * (VOCAB_SIZE + 1)} entries over the prompt, at most 1000000" in stream.finishes[1].error.message
