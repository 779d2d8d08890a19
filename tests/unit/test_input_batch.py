"""The worker's record follows the scheduler's differences, and the arrays of a step say what a slow walk says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.model_executor.input_batch import InputBatch
from engine_core.model_executor.step_inputs import StepInputs
from engine_core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from engine_core.scheduler.request import NO_LOGPROBS, LogprobsParams, SamplingParams

A, B, C = ("s", 1), ("s", 2), ("t", 1)


def new(
    key, prompt, block_ids, *, output=(), computed=0, sampling=None, min_tokens=0, masked=(), logprobs=NO_LOGPROBS
) -> NewRequestData:
    sampling = sampling or SamplingParams(temperature=0.0)
    prompt, output, block_ids = list(prompt), list(output), list(block_ids)
    return NewRequestData(key, prompt, output, sampling, min_tokens, masked, (block_ids,), computed, logprobs)


class Worker:
    """An InputBatch that is stepped, with made-up sampled tokens."""

    def __init__(self, max_num_seqs: int = 4, block_size: int = 4, num_groups: int = 1) -> None:
        self.batch = InputBatch(max_num_seqs, block_size, vocab_size=1000, num_groups=num_groups)

    def step(self, scheduled, *, new=(), cached=(), finished=(), sampled=()) -> StepInputs:
        output = SchedulerOutput(0, list(new), list(cached), scheduled, sum(scheduled.values()), list(finished))
        self.batch.update(output)
        inputs = self.batch.prepare(scheduled)
        self.batch.finish_step(inputs, list(sampled))
        return inputs


def test_prefill_then_decode():
    worker = Worker()
    inputs = worker.step({A: 6}, new=[new(A, range(10, 16), [3, 7])], sampled=[99])
    assert inputs.input_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert inputs.slot_mappings[0].tolist() == [12, 13, 14, 15, 28, 29]
    assert inputs.seq_lens.tolist() == [6]
    assert inputs.logits_indices.tolist() == [5]
    inputs = worker.step({A: 1}, sampled=[98])
    assert (inputs.input_ids.tolist(), inputs.positions.tolist(), inputs.slot_mappings[0].tolist()) == ([99], [6], [30])
    assert worker.batch.known_token_ids(A) == [10, 11, 12, 13, 14, 15, 99, 98]


def test_a_chunk_samples_only_when_it_reaches_the_last_known_token():
    worker = Worker()
    assert worker.step({A: 4}, new=[new(A, range(6), [1])]).sampled.size == 0
    inputs = worker.step({A: 2}, cached=[CachedRequestData(A, ([2],), 4)], sampled=[50])
    assert (inputs.sampled.tolist(), inputs.input_ids.tolist(), inputs.slot_mappings[0].tolist()) == (
        [0],
        [4, 5],
        [8, 9],
    )


def test_prefix_hit_computes_the_rest_only():
    inputs = Worker().step({A: 2}, new=[new(A, range(6), [5, 6], computed=4)], sampled=[1])
    assert inputs.input_ids.tolist() == [4, 5]
    assert inputs.slot_mappings[0].tolist() == [24, 25]
    assert inputs.block_tables[0].tolist() == [[5, 6]]


def test_each_group_of_layers_has_a_table_of_its_own():
    worker = Worker(num_groups=2)
    first = replace(new(A, range(6), []), block_ids=([3, 7], [0, 5]))
    inputs = worker.step({A: 2}, new=[replace(first, num_computed_tokens=4)], sampled=[9])
    assert [slots.tolist() for slots in inputs.slot_mappings] == [[28, 29], [20, 21]]
    assert [table.tolist() for table in inputs.block_tables] == [[[3, 7]], [[0, 5]]]
    inputs = worker.step({A: 3}, cached=[CachedRequestData(A, ([1], [2]), 0)])
    assert [table.tolist() for table in inputs.block_tables] == [[[3, 7, 1]], [[0, 5, 2]]]
    inputs = worker.step({A: 1}, cached=[CachedRequestData(A, ([4], [6]), 0, is_resumed=True)])
    assert [table.tolist() for table in inputs.block_tables] == [[[4]], [[6]]]


def test_mixed_batch_keeps_the_schedulers_order():
    worker = Worker()
    worker.step({A: 2}, new=[new(A, [1, 2], [1])], sampled=[3])
    scheduled = {B: 3, A: 1, C: 2}
    fresh = [new(B, [20, 21, 22, 23], [2]), new(C, [30, 31], [4])]
    inputs = worker.step(scheduled, new=fresh, sampled=[7, 8])
    assert inputs.keys == [B, A, C]
    assert inputs.query_start_loc.tolist() == [0, 3, 4, 6]
    assert inputs.input_ids.tolist() == [20, 21, 22, 3, 30, 31]
    # B is a partial prefill.
    assert inputs.sampled.tolist() == [1, 2]
    assert inputs.logits_indices.tolist() == [3, 5]
    assert worker.batch.known_token_ids(A)[-1] == 7
    assert worker.batch.known_token_ids(C)[-1] == 8


def test_resumption_replaces_the_block_table_and_computes_all_known_tokens_again():
    worker = Worker()
    worker.step({A: 4}, new=[new(A, range(4), [1, 2])], sampled=[40])
    worker.step({A: 1}, sampled=[41])
    inputs = worker.step({A: 6}, cached=[CachedRequestData(A, ([8, 9],), 0, is_resumed=True)], sampled=[42])
    assert inputs.input_ids.tolist() == [0, 1, 2, 3, 40, 41]
    assert inputs.slot_mappings[0].tolist() == [32, 33, 34, 35, 36, 37]
    assert inputs.block_tables[0].tolist() == [[8, 9]]
    assert inputs.sampled.tolist() == [0]


def test_resumption_with_fewer_blocks_leaves_no_old_block_behind():
    worker = Worker()
    worker.step({A: 12, B: 12}, new=[new(A, range(12), [1, 2, 3]), new(B, range(12), [4, 5, 6])], sampled=[1, 1])
    changed = [CachedRequestData(A, ([7],), 0, is_resumed=True), CachedRequestData(B, ([8],), 12)]
    inputs = worker.step({A: 4, B: 1}, cached=changed, sampled=[2])
    assert inputs.block_tables[0].tolist() == [[7, 0, 0, 0], [4, 5, 6, 8]]


def test_tokens_of_a_resumed_generation_count_as_output():
    worker = Worker()
    sampling = SamplingParams(temperature=1.0, seed=-1, presence_penalty=1.0)
    inputs = worker.step({A: 5}, new=[new(A, [1, 2], [1, 2], output=[3, 4, 5], sampling=sampling)], sampled=[6])
    assert inputs.sampled.tolist() == [0]
    batch = worker.batch.sampling_batch(worker.batch.prepare({A: 1}))
    assert batch.token_indices.tolist() == [4]
    assert batch.params["seed"].tolist() == [2**64 - 1]
    assert batch.ruled_rows[0].output_token_ids.tolist() == [3, 4, 5, 6]


def test_a_finished_request_is_dropped_and_its_row_starts_clean():
    worker = Worker(max_num_seqs=1)
    banned = SamplingParams(temperature=1.0, bad_words=((1,),))
    worker.step({A: 9}, new=[new(A, range(9), [1, 2, 3], sampling=banned)], sampled=[1])
    worker.step({}, finished=[A])
    assert len(worker.batch) == 0
    inputs = worker.step({B: 2}, new=[new(B, [5, 6], [4])], sampled=[1])
    assert inputs.block_tables[0].tolist() == [[4]]
    assert worker.batch.known_token_ids(B) == [5, 6, 1]
    assert worker.batch.sampling_batch(worker.batch.prepare({B: 1})) is None


def test_finished_is_applied_before_new():
    worker = Worker(max_num_seqs=1)
    worker.step({A: 2}, new=[new(A, [1, 2], [1])], sampled=[1])
    worker.step({B: 2}, new=[new(B, [1, 2], [2])], finished=[A], sampled=[1])
    assert len(worker.batch) == 1


def test_a_finished_key_that_was_never_sent_is_ignored():
    Worker().step({}, finished=[A])


def test_a_request_that_is_unknown_is_an_error():
    with pytest.raises(KeyError):
        Worker().step({A: 1})


def test_min_tokens_rules_end_when_enough_was_generated():
    worker = Worker()
    worker.step({A: 2}, new=[new(A, [1, 2], [1], min_tokens=2, masked=(9,))], sampled=[3])
    assert len(worker.batch.sampling_batch(worker.batch.prepare({A: 1})).ruled_rows) == 1
    worker.step({A: 1}, sampled=[4])
    inputs = worker.batch.prepare({A: 1})
    assert worker.batch.sampling_batch(inputs).ruled_rows == []
    # Found out once: from then on the row costs what any greedy one does.
    assert worker.batch.sampling_batch(inputs) is None


def prompt_rows(worker: Worker, scheduled) -> list[tuple]:
    found = worker.batch.prompt_logprobs(worker.batch.prepare(scheduled))
    return [(r.key, r.start, r.num_top, r.logits_indices.tolist(), r.token_ids.tolist()) for r in found]


def test_prompt_rows_are_about_the_next_prompt_tokens():
    worker = Worker()
    wants, other = LogprobsParams(num_prompt=2), LogprobsParams(num_output=5)
    worker.batch.update(
        SchedulerOutput(
            0,
            [new(A, range(10, 16), [1, 2], logprobs=wants), new(B, range(20, 24), [3], logprobs=other)],
            [],
            {},
            0,
            [],
        )
    )
    assert prompt_rows(worker, {B: 2, A: 4}) == [(A, 0, 2, [2, 3, 4, 5], [11, 12, 13, 14])]
    worker.step({B: 4, A: 4}, sampled=[7])
    # Position 5, the last one, is about output.
    assert prompt_rows(worker, {B: 1, A: 2}) == [(A, 4, 2, [1], [15])]
    worker.step({A: 2}, sampled=[8])
    assert prompt_rows(worker, {A: 1}) == []
    # Preempted and computed again from the start, prompt and output.
    worker.batch.update(SchedulerOutput(0, [], [CachedRequestData(A, ([5, 6],), 0, is_resumed=True)], {}, 0, []))
    assert prompt_rows(worker, {A: 7}) == [(A, 0, 2, [0, 1, 2, 3, 4], [11, 12, 13, 14, 15])]


def test_only_sampled_rows_that_ask_are_named():
    worker = Worker()
    wants = LogprobsParams(num_output=1)
    requests = [
        new(A, [1, 2], [1]),
        new(B, [1, 2], [2], logprobs=wants),
        new(C, [1, 2], [3], logprobs=LogprobsParams(num_prompt=0)),
    ]
    worker.batch.update(SchedulerOutput(0, requests, [], {}, 0, []))
    sampled = worker.batch.sampled_logprobs(worker.batch.prepare({A: 2, B: 2, C: 2}))
    assert [(row.index, row.key, row.params) for row in sampled] == [(1, B, wants)]
    assert worker.batch.sampled_logprobs(worker.batch.prepare({A: 2, B: 1})) == []


def test_a_reused_row_has_forgotten_what_its_request_asked():
    worker = Worker(max_num_seqs=1)
    worker.step({A: 2}, new=[new(A, [1, 2], [1], logprobs=LogprobsParams(0, 0))], sampled=[1])
    worker.step({}, finished=[A])
    worker.batch.update(SchedulerOutput(0, [new(B, [1, 2], [2])], [], {}, 0, []))
    inputs = worker.batch.prepare({B: 2})
    assert (worker.batch.sampled_logprobs(inputs), worker.batch.prompt_logprobs(inputs)) == ([], [])


def test_more_and_longer_requests_than_the_first_tables_hold():
    # Preempted requests keep their row, so a worker may know more than max_num_seqs.
    worker = Worker(max_num_seqs=2)
    keys = [("s", handle) for handle in range(9)]
    prompts = {key: np.arange(300 * (key[1] + 1)) % 997 for key in keys}
    tables = {key: list(range(1, len(prompt) // 4 + 2)) for key, prompt in prompts.items()}
    for key in keys:
        worker.step({key: len(prompts[key])}, new=[new(key, prompts[key], tables[key])], sampled=[5])
    for key in keys:
        assert worker.batch.known_token_ids(key) == [*prompts[key].tolist(), 5]
    inputs = worker.step(dict.fromkeys(keys, 1), sampled=[6] * 9)
    assert inputs.seq_lens.tolist() == [len(prompts[key]) + 1 for key in keys]
    assert inputs.slot_mappings[0].tolist() == [4 * tables[key][-1] + len(prompts[key]) % 4 for key in keys]


def test_the_arrays_have_the_types_that_kernels_take():
    inputs = Worker().step({A: 3, B: 1}, new=[new(A, range(3), [1]), new(B, [4], [2])], sampled=[1, 2])
    assert {inputs.query_start_loc.dtype, inputs.seq_lens.dtype, inputs.prompt_lens.dtype} == {np.dtype(np.int32)}
    assert inputs.block_tables[0].dtype == np.int32
    assert inputs.block_tables[0].flags.c_contiguous
    wide = (inputs.input_ids, inputs.positions, inputs.slot_mappings[0], inputs.logits_indices, inputs.sampled)
    assert {array.dtype for array in wide} == {np.dtype(np.int64)}


class _CountingKeys(dict):
    num_lookups = 0

    def __getitem__(self, key):
        self.num_lookups += 1
        return super().__getitem__(key)


def test_a_step_of_the_same_requests_looks_up_none_and_writes_where_the_last_one_did():
    worker = Worker()
    worker.step({A: 2, B: 2}, new=[new(A, [1, 2], [1]), new(B, [1, 2], [2])], sampled=[3, 4])
    first = worker.step({A: 1, B: 1}, sampled=[5, 6])
    worker.batch._rows = rows = _CountingKeys(worker.batch._rows)
    second = worker.step({A: 1, B: 1}, sampled=[7, 8])
    assert rows.num_lookups == 0
    assert second.rows is first.rows
    for name in ("query_start_loc", "seq_lens", "positions", "input_ids", "logits_indices"):
        assert np.shares_memory(getattr(first, name), getattr(second, name)), name
    # A new block goes straight into the table of the batch.
    added = [CachedRequestData(A, ([9],), 4), CachedRequestData(B, ([8],), 4)]
    third = worker.step({A: 1, B: 1}, cached=added, sampled=[1, 2])
    assert third.block_tables[0].tolist() == [[1, 9], [2, 8]]
    fourth = worker.step({A: 1, B: 1}, sampled=[1, 2])
    assert fourth.block_tables[0] is third.block_tables[0]


def test_a_new_block_within_the_width_of_the_batch_is_written_into_its_table():
    worker = Worker()
    worker.step({A: 9, B: 4}, new=[new(A, range(9), [1, 2, 3]), new(B, range(4), [4])], sampled=[1, 2])
    before = worker.step({A: 1}, sampled=[1])
    assert before.block_tables[0].tolist() == [[1, 2, 3]]
    table = worker.step({A: 1, B: 1}, cached=[CachedRequestData(B, ([5],), 4)], sampled=[1, 2]).block_tables[0]
    assert table.tolist() == [[1, 2, 3], [4, 5, 0]]
    inputs = worker.step({A: 1, B: 1}, cached=[CachedRequestData(B, ([6],), 5)], sampled=[1, 2])
    assert inputs.block_tables[0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert np.shares_memory(inputs.block_tables[0], table)


def test_a_key_that_ends_and_comes_again_in_one_step_is_a_new_request():
    worker = Worker()
    worker.step({A: 4, B: 2}, new=[new(A, range(4), [1]), new(B, range(2), [2])], sampled=[1, 2])
    again = [new(C, [7], [3]), new(A, [8, 9], [4])]
    inputs = worker.step({A: 2, B: 1}, new=again, finished=[A], sampled=[1, 2])
    assert inputs.input_ids.tolist() == [8, 9, 2]
    assert inputs.block_tables[0].tolist() == [[4], [2]]


def test_what_outlives_a_step_is_not_written_again():
    worker = Worker()
    first = worker.step({A: 2, B: 3}, new=[new(A, [1, 2], [1]), new(B, [1, 2, 3], [2])], sampled=[3, 4])
    kept = (list(first.keys), first.rows.tolist(), first.sampled.tolist())
    worker.step({B: 1}, finished=[A], sampled=[5])
    worker.step({C: 2, B: 1}, new=[new(C, [1, 2, 3], [3])], sampled=[5])
    assert (first.keys, first.rows.tolist(), first.sampled.tolist()) == kept


def test_a_batch_of_greedy_rows_needs_no_sampling_batch_and_a_mixed_one_names_the_others():
    worker = Worker()
    random, ruled = SamplingParams(temperature=0.7, seed=3), SamplingParams(temperature=0.0, presence_penalty=1.0)
    fresh = [new(A, [1, 2], [1]), new(B, [1, 2, 3], [2], sampling=random), new(C, [1, 2], [3], sampling=ruled)]
    worker.step({A: 2, B: 2, C: 2}, new=fresh, sampled=[4, 5])
    assert worker.batch.sampling_batch(worker.batch.prepare({A: 1})) is None
    # B does not sample in the first of these.
    for scheduled, rows, ruled_places in (({A: 1, C: 1}, [1], [0]), ({A: 1, B: 1, C: 1}, [1, 2], [1])):
        batch = worker.batch.sampling_batch(worker.batch.prepare(scheduled))
        assert batch.rows.tolist() == rows
        assert [row.row for row in batch.ruled_rows] == ruled_places
    assert batch.params["temperature"].tolist() == [0.7, 0.0]
    assert batch.ruled_rows[0].output_token_ids.tolist() == [5]


class SlowWorker:
    """What a worker knows, in lists, and the arrays of a step by walking them token by token."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.tokens: dict = {}
        self.blocks: dict = {}
        self.computed: dict = {}

    def walk(self, scheduled) -> dict:
        rows = {name: [] for name in ("input_ids", "positions", "slots", "seq_lens", "sampled", "last")}
        for index, (key, num_tokens) in enumerate(scheduled.items()):
            for position in range(self.computed[key], self.computed[key] + num_tokens):
                block, offset = self.blocks[key][position // self._block_size], position % self._block_size
                rows["input_ids"].append(self.tokens[key][position])
                rows["positions"].append(position)
                rows["slots"].append(block * self._block_size + offset)
            self.computed[key] += num_tokens
            rows["seq_lens"].append(self.computed[key])
            if self.computed[key] == len(self.tokens[key]):
                rows["sampled"].append(index)
                rows["last"].append(len(rows["input_ids"]) - 1)
        width = max((len(self.blocks[key]) for key in scheduled), default=0)
        rows["table"] = [self.blocks[key] + [0] * (width - len(self.blocks[key])) for key in scheduled]
        return rows


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_story_gives_the_arrays_of_a_slow_walk(data):
    """Requests come, run in chunks or token by token, are left out, resumed elsewhere, and end."""
    worker, slow = Worker(max_num_seqs=2), SlowWorker(4)
    next_block = iter(range(1, 10_000))
    for step_number in range(data.draw(st.integers(1, 14))):
        finished = [key for key in list(slow.tokens) if data.draw(st.integers(0, 7)) == 0]
        for key in finished:
            del slow.tokens[key], slow.blocks[key], slow.computed[key]
        scheduled, fresh, changed = {}, [], []
        for key in data.draw(st.permutations(list(slow.tokens))) if data.draw(st.booleans()) else list(slow.tokens):
            action = data.draw(st.sampled_from(["run", "run", "run", "skip", "resume"]))
            if action == "skip":
                continue
            if action == "resume":
                slow.blocks[key], slow.computed[key] = [], 0
            num_left = len(slow.tokens[key]) - slow.computed[key]
            scheduled[key] = data.draw(st.integers(1, num_left))
            num_missing = -(-(slow.computed[key] + scheduled[key]) // 4) - len(slow.blocks[key])
            added = [next(next_block) for _ in range(num_missing)]
            slow.blocks[key] += added
            if added:
                changed.append(CachedRequestData(key, (added,), slow.computed[key], is_resumed=action == "resume"))
        for handle in range(data.draw(st.integers(0, 2))):
            key, length = ("s", 10 * step_number + handle), data.draw(st.integers(1, 9))
            blocks = [next(next_block) for _ in range(-(-length // 4))]
            slow.tokens[key], slow.blocks[key], slow.computed[key] = list(range(length)), list(blocks), 0
            scheduled[key] = data.draw(st.integers(1, length))
            fresh.append(new(key, range(length), blocks))
        expected = slow.walk(scheduled)
        sampled = [1000 + index for index in expected["sampled"]]
        worker.batch.update(SchedulerOutput(0, fresh, changed, scheduled, sum(scheduled.values()), finished))
        inputs = worker.batch.prepare(scheduled)
        assert inputs.query_start_loc.tolist() == np.cumsum([0, *scheduled.values()]).tolist()
        assert {
            "input_ids": inputs.input_ids.tolist(),
            "positions": inputs.positions.tolist(),
            "slots": inputs.slot_mappings[0].tolist(),
            "seq_lens": inputs.seq_lens.tolist(),
            "sampled": inputs.sampled.tolist(),
            "last": inputs.logits_indices.tolist(),
            "table": inputs.block_tables[0].tolist(),
        } == expected
        worker.batch.finish_step(inputs, np.array(sampled, dtype=np.int64))
        for index, token_id in zip(expected["sampled"], sampled, strict=True):
            slow.tokens[list(scheduled)[index]].append(token_id)
