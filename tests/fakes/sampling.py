"""Rows and batches for tests of the sampler, made the way the worker makes them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine_core.model_executor.sampler.sampling_batch import (
    SAMPLING_DTYPE,
    LogitsRules,
    RuledRow,
    SamplingBatch,
    sampling_record,
)
from engine_core.scheduler.output import NewRequestData
from engine_core.scheduler.request import SamplingParams

VOCAB_SIZE = 1 << 20


@dataclass
class Row:
    sampling: SamplingParams
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    min_tokens: int = 0
    min_tokens_masked_ids: tuple[int, ...] = ()


def random_row(*, prompt=(), output=(), num_output=0, min_tokens=0, masked=(), **sampling) -> Row:
    output = list(output) or [0] * num_output
    return Row(SamplingParams(**sampling), list(prompt), output, min_tokens, tuple(masked))


def greedy_row(**row) -> Row:
    return random_row(temperature=0.0, **row)


def make_batch(rows: list[Row], vocab_size: int = VOCAB_SIZE) -> SamplingBatch:
    params = np.array([sampling_record(row.sampling) for row in rows], dtype=SAMPLING_DTYPE)
    indices = np.array([len(row.output) for row in rows], dtype=np.int64)
    return SamplingBatch(np.arange(len(rows)), params, indices, ruled_rows(rows, vocab_size))


def ruled_rows(rows: list[Row], vocab_size: int = VOCAB_SIZE) -> list[RuledRow]:
    ruled = []
    for index, row in enumerate(rows):
        rules = LogitsRules.of(_new_request(row), vocab_size)
        if rules is not None and rules.apply_after(len(row.output)):
            prompt, output = (np.array(ids, dtype=np.int64) for ids in (row.prompt, row.output))
            ruled.append(RuledRow(index, rules, output, rules.start_counts(prompt)))
    return ruled


def _new_request(row: Row) -> NewRequestData:
    return NewRequestData(
        key=("session", 0),
        prompt_token_ids=row.prompt,
        output_token_ids=row.output,
        sampling=row.sampling,
        min_tokens=row.min_tokens,
        min_tokens_masked_ids=row.min_tokens_masked_ids,
        block_ids=(),
        num_computed_tokens=0,
    )
