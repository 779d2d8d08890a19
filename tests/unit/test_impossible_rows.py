"""Rows that leave no token to draw get one all the same, and nobody beside them notices.

A grammar and allowed ids that share no token forbid a whole row; a broken model computes what is no number. The
grammar refuses the token that comes out, which ends that one request; an exception would end the engine.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_core.model_executor.input_batch import InputBatch
from engine_core.model_executor.sampler.sampler import sample
from engine_core.scheduler.output import NewRequestData, SchedulerOutput
from engine_core.scheduler.request import SamplingParams
from engine_core.structured_output.bitmask import GrammarBitmask
from fakes.sampling import greedy_row, make_batch, random_row

INF, NAN = float("inf"), float("nan")
# Not a multiple of any group; few and many groups of 32, and a vocabulary that is all candidates.
VOCAB_SIZES = (500, 20_001, 49_157)
SAMPLINGS = {
    "untruncated": {},
    "min-p": {"min_p": 0.1},
    "top-k": {"top_k": 40},
    "wide top-k": {"top_k": 5000, "top_p": 0.9},
    "top-p": {"top_p": 0.9},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.1},
    "cold": {"temperature": 1e-40},
}
BROKEN = {
    "forbidden": lambda row: row.fill_(-INF),
    "no number": lambda row: row.fill_(NAN),
    "one is no number": lambda row: row[17].fill_(NAN),
    "infinite": lambda row: row[17].fill_(INF),
}


def logits_of(num_rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 4


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("breaks", BROKEN.values(), ids=BROKEN.keys())
def test_a_row_without_a_possible_token_gets_an_id_of_the_vocabulary(breaks, sampling, vocab_size):
    logits = logits_of(1, vocab_size)
    breaks(logits[0])
    [token_id] = sample(logits, make_batch([random_row(seed=5, **sampling)], vocab_size))
    assert 0 <= token_id < vocab_size


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_its_neighbours_draw_what_they_draw_alone(sampling, vocab_size):
    logits = logits_of(2 + 2 * len(BROKEN), vocab_size)
    for number, breaks in enumerate(BROKEN.values()):
        breaks(logits[2 * number + 1])
    rows = [random_row(seed=seed, **sampling) for seed in range(len(logits))]
    rows[-1] = greedy_row()
    together = sample(logits.clone(), make_batch(rows, vocab_size))
    assert ((together >= 0) & (together < vocab_size)).all()
    for index in (0, 2, 4, 6, 8, 9):
        alone = sample(logits[index : index + 1].clone(), make_batch([rows[index]], vocab_size))
        assert together[index] == alone[0]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_a_grammar_and_allowed_ids_that_share_no_token(sampling):
    vocab_size, ruled, free = 20_001, ("s", 1), ("s", 2)
    batch = InputBatch(2, 16, vocab_size)
    asked = {
        ruled: SamplingParams(seed=5, allowed_token_ids=(7, 8), **sampling),
        free: SamplingParams(seed=6, **sampling),
    }
    new = [
        NewRequestData(key, [1, 2], [], params, 0, (), ([block],), 0)
        for block, (key, params) in enumerate(asked.items(), start=1)
    ]
    scheduled = dict.fromkeys(asked, 2)
    batch.update(SchedulerOutput(0, new, [], scheduled, 4, []))
    inputs = batch.prepare(scheduled)
    words = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    words[0, 0] = 1 << 9
    logits = logits_of(2, vocab_size)
    expected = sample(logits[1:].clone(), make_batch([random_row(seed=6, **sampling)], vocab_size))
    sampled = sample(logits, batch.sampling_batch(inputs, GrammarBitmask([ruled], words)))
    # Token 9 is all that the grammar would take.
    assert 0 <= sampled[0] < vocab_size
    assert sampled[0] != 9
    assert sampled[1] == expected[0]
