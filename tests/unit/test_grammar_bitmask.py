"""The bitmask of a step, and what it does to the logits."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.model_executor.input_batch import InputBatch
from engine_core.model_executor.sampler.grammar_mask import apply_grammar_mask
from engine_core.model_executor.sampler.sampler import sample
from engine_core.model_executor.sampler.sampling_batch import GrammarRows
from engine_core.scheduler.output import NewRequestData, SchedulerOutput
from engine_core.scheduler.request import SamplingParams
from engine_core.structured_output.bitmask import BitmaskFiller, GrammarBitmask
from fakes.sampling import greedy_row, make_batch, random_row

WIDTH = 100


class Source:
    """Writes its number into its row, and remembers by which thread."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.thread: threading.Thread | None = None

    def fill(self, words: np.ndarray, row: int) -> None:
        self.thread = threading.current_thread()
        words[row] = self.number


class BrokenSource:
    def fill(self, words: np.ndarray, row: int) -> None:
        raise RuntimeError("no mask")


@pytest.mark.parametrize("num_rows", [1, 16, 128, 129, 300])
def test_every_row_is_its_own_requests_and_only_many_use_threads(num_rows: int) -> None:
    filler = BitmaskFiller(WIDTH, num_threads=3)
    sources = [Source(number) for number in range(num_rows)]
    bitmask = filler.fill([(("s", source.number), source) for source in sources])
    assert bitmask.keys == [("s", number) for number in range(num_rows)]
    assert bitmask.words.shape == (num_rows, 4)
    assert bitmask.words.dtype == np.int32
    assert (bitmask.words == np.arange(num_rows)[:, None]).all()
    by_other_threads = {source.thread for source in sources} - {threading.current_thread()}
    assert bool(by_other_threads) == (num_rows > 128)
    filler.shutdown()


def test_a_failure_in_a_thread_is_not_lost() -> None:
    filler = BitmaskFiller(WIDTH, num_threads=2)
    with pytest.raises(RuntimeError, match="no mask"):
        filler.fill([(("s", number), BrokenSource()) for number in range(200)])
    filler.shutdown()


def words_of(allowed: list[set[int]], width: int) -> np.ndarray:
    bits = np.zeros((len(allowed), -(-width // 32) * 32), dtype=np.uint8)
    for row, token_ids in enumerate(allowed):
        bits[row, sorted(token_ids)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@given(
    allowed=st.lists(st.sets(st.integers(0, WIDTH - 1)), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_exactly_the_allowed_tokens_of_the_grammars_rows_remain(allowed, data) -> None:
    rows = data.draw(st.permutations(range(len(allowed) + 2)))[: len(allowed)]
    logits = torch.arange((len(allowed) + 2) * WIDTH, dtype=torch.float32).reshape(-1, WIDTH)
    expected = logits.clone()
    for row, token_ids in zip(rows, allowed, strict=True):
        for token_id in set(range(WIDTH)) - token_ids:
            expected[row, token_id] = float("-inf")
    apply_grammar_mask(logits, GrammarRows(np.array(rows, dtype=np.int64), words_of(allowed, WIDTH)))
    assert torch.equal(logits, expected)


def constrained_batch(rows, allowed: dict[int, set[int]]):
    batch = make_batch(rows, WIDTH)
    masks = GrammarRows(np.array(list(allowed), dtype=np.int64), words_of(list(allowed.values()), WIDTH))
    return replace(batch, grammar=masks)


def test_greedy_rows_without_rules_are_masked_too() -> None:
    logits = torch.arange(WIDTH, dtype=torch.float32).repeat(2, 1)
    assert sample(logits, constrained_batch([greedy_row(), greedy_row()], {1: {4, 40}})).tolist() == [99, 40]


@pytest.mark.parametrize("seed", range(20))
def test_a_draw_stays_within_the_mask(seed: int) -> None:
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed))
    row = random_row(temperature=2.0, seed=seed, top_p=0.9, top_k=50, min_p=0.01, logit_bias=((5, 100.0),))
    assert sample(logits, constrained_batch([row], {0: {31, 32, 63}})).item() in {31, 32, 63}


def test_min_tokens_does_not_ban_the_end_when_nothing_else_is_left() -> None:
    logits = torch.zeros(2, WIDTH)
    rows = [greedy_row(min_tokens=5, masked=(2,)), greedy_row(min_tokens=5, masked=(2,))]
    assert sample(logits, constrained_batch(rows, {0: {2}, 1: {2, 7}})).tolist() == [2, 7]


def test_rules_that_leave_nothing_end_in_a_token_and_not_in_a_failure() -> None:
    logits = torch.zeros(2, WIDTH)
    rows = [greedy_row(allowed_token_ids=(5,)), random_row(allowed_token_ids=(5,))]
    assert len(sample(logits, constrained_batch(rows, {0: {6}, 1: {6}}))) == 2


def test_masks_find_the_rows_of_the_requests_that_sample() -> None:
    batch = InputBatch(4, 4, WIDTH)
    keys = [("s", number) for number in range(4)]
    new = [
        NewRequestData(key, [1, 2, 3], [], SamplingParams(), 0, (), block_ids=([number + 1],), num_computed_tokens=0)
        for number, key in enumerate(keys)
    ]
    # The second one computes a part of its prompt only.
    tokens = dict(zip(keys, [3, 2, 3, 3], strict=True))
    batch.update(SchedulerOutput(1, new, [], tokens, 11, []))
    inputs = batch.prepare(tokens)
    words = np.arange(5, dtype=np.int32)[:, None].repeat(4, axis=1)
    bitmask = GrammarBitmask([keys[3], keys[1], ("s", 9), keys[0]], words[:4])
    grammar = batch.sampling_batch(inputs, bitmask).grammar
    assert grammar is not None
    assert grammar.rows.tolist() == [2, 0]
    assert grammar.words[:, 0].tolist() == [0, 3]
    assert batch.sampling_batch(inputs, GrammarBitmask([keys[1]], words[:1])).grammar is None
    assert batch.sampling_batch(inputs).grammar is None
