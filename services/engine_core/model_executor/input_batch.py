"""The worker's own record of its requests, kept up to date by differences, and the arrays of a step made from it.

Owner: the busy-loop thread. The scheduler sends a request whole once; afterwards only new blocks and counters. Sampled
tokens are appended here and are not sent back. Rows are reused; a key is never reused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_core.kv_cache.kv_cache_manager import BlockIds
from engine_core.model_executor.row_table import RowTable
from engine_core.model_executor.sampler.logprobs import PromptRows, SampledRow
from engine_core.model_executor.sampler.sampling_batch import (
    SAMPLING_DTYPE,
    GrammarRows,
    LogitsRules,
    RuledRow,
    SamplingBatch,
    sampling_record,
)
from engine_core.model_executor.step_inputs import StepInputs
from engine_core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from engine_core.scheduler.request import NO_LOGPROBS, LogprobsParams, RequestKey
from engine_core.structured_output.bitmask import GrammarBitmask
from stepwire.packed_logprobs import num_entries

_COUNTS_DTYPE = np.dtype([("prompt", np.int64), ("known", np.int64), ("computed", np.int64), ("blocks", np.int64)])
_INITIAL_COLUMNS = 256


class InputBatch:
    """Tokens, block tables, counts and sampling parameters of every request the worker knows."""

    def __init__(self, max_num_seqs: int, block_size: int, vocab_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._rows: dict[RequestKey, int] = {}
        self._rules: dict[int, LogitsRules] = {}
        # Of the rows that want some.
        self._logprobs: dict[int, LogprobsParams] = {}
        # Preempted requests keep their row, so there may be more rows than max_num_seqs.
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._tokens = RowTable(max_num_seqs, _INITIAL_COLUMNS)
        # One for each group of layers; a row has as many blocks in each.
        self._blocks = [RowTable(max_num_seqs, _INITIAL_COLUMNS // block_size + 1) for _ in range(num_groups)]
        self._counts = np.zeros(max_num_seqs, dtype=_COUNTS_DTYPE)
        self._sampling = np.zeros(max_num_seqs, dtype=SAMPLING_DTYPE)

    def __len__(self) -> int:
        return len(self._rows)

    def known_token_ids(self, key: RequestKey) -> list[int]:
        """Prompt and output of a request."""
        row = self._rows[key]
        return [int(token_id) for token_id in self._tokens.values[row, : self._counts["known"][row]]]

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Apply the differences of one step: finished, then new, then changed requests."""
        for key in scheduler_output.finished_keys:
            self._remove(key)
        for new in scheduler_output.new_requests:
            self._add(new)
        for cached in scheduler_output.cached_requests:
            self._change(cached)

    def prepare(self, num_scheduled_tokens: dict[RequestKey, int]) -> StepInputs:
        """The arrays of a step, by array operations over all rows at once."""
        rows = np.array([self._rows[key] for key in num_scheduled_tokens], dtype=np.int64)
        query_lens = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(rows))
        query_start_loc = np.concatenate([[0], np.cumsum(query_lens)])
        computed = self._counts["computed"][rows]
        seq_lens = computed + query_lens
        token_rows = np.repeat(rows, query_lens)
        positions = np.arange(query_start_loc[-1]) + np.repeat(computed - query_start_loc[:-1], query_lens)
        columns, offsets = np.divmod(positions, self._block_size)
        num_columns = int(self._counts["blocks"][rows].max(initial=0))
        return StepInputs(
            keys=list(num_scheduled_tokens),
            rows=rows,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            prompt_lens=self._counts["prompt"][rows],
            block_tables=tuple(table.values[rows, :num_columns] for table in self._blocks),
            input_ids=self._tokens.values[token_rows, positions],
            positions=positions,
            slot_mappings=tuple(
                table.values[token_rows, columns] * self._block_size + offsets for table in self._blocks
            ),
            sampled=np.flatnonzero(seq_lens == self._counts["known"][rows]),
        )

    def sampling_batch(self, inputs: StepInputs, bitmask: GrammarBitmask | None = None) -> SamplingBatch:
        """Parameters of the sampled sequences, and the rules and grammar masks of those that have some."""
        rows = inputs.rows[inputs.sampled]
        num_outputs = self._counts["known"][rows] - self._counts["prompt"][rows]
        ruled: list[RuledRow] = []
        if self._rules:
            ruled = [
                self._ruled_row(index, row)
                for index, row in enumerate(rows.tolist())
                if row in self._rules and self._rules[row].apply_after(int(num_outputs[index]))
            ]
        return SamplingBatch(self._sampling[rows], num_outputs, ruled, _grammar_rows(inputs, bitmask))

    def sampled_logprobs(self, inputs: StepInputs) -> list[SampledRow]:
        """The sampled sequences whose log-probabilities are wanted."""
        if not self._logprobs:
            return []
        rows = enumerate(inputs.rows[inputs.sampled].tolist())
        wanted = [(index, self._logprobs[row]) for index, row in rows if row in self._logprobs]
        return [
            SampledRow(index, inputs.keys[inputs.sampled[index]], params)
            for index, params in wanted
            if params.has_output
        ]

    def prompt_logprobs(self, inputs: StepInputs) -> list[PromptRows]:
        """The computed parts of prompts whose log-probabilities are wanted."""
        if not self._logprobs:
            return []
        found = (self._prompt_rows(inputs, index, row) for index, row in enumerate(inputs.rows.tolist()))
        return [rows for rows in found if rows is not None]

    def finish_step(self, inputs: StepInputs, sampled_token_ids: Sequence[int]) -> None:
        """Count the step's tokens as computed and append the sampled ones, in the order of `inputs.sampled`."""
        self.count_computed(inputs)
        self.append_sampled(inputs, sampled_token_ids)

    def count_computed(self, inputs: StepInputs) -> None:
        self._counts["computed"][inputs.rows] = inputs.seq_lens

    def append_sampled(self, inputs: StepInputs, sampled_token_ids: Sequence[int]) -> None:
        rows = inputs.rows[inputs.sampled]
        if rows.size:
            known = self._counts["known"][rows]
            self._tokens.ensure(0, int(known.max()) + 1)
            self._tokens.values[rows, known] = sampled_token_ids
            self._counts["known"][rows] = known + 1

    def _add(self, new: NewRequestData) -> None:
        row = self._take_row()
        self._rows[new.key] = row
        known = [*new.prompt_token_ids, *new.output_token_ids]
        self._tokens.ensure(0, len(known) + 1)
        self._tokens.values[row, : len(known)] = known
        self._counts[row] = (len(new.prompt_token_ids), len(known), new.num_computed_tokens, 0)
        self._sampling[row] = sampling_record(new.sampling)
        rules = LogitsRules.of(new, self._vocab_size)
        if rules is not None:
            self._rules[row] = rules
        if new.logprobs != NO_LOGPROBS:
            self._logprobs[row] = new.logprobs
        self._append_blocks(row, new.block_ids)

    def _change(self, cached: CachedRequestData) -> None:
        row = self._rows[cached.key]
        if cached.is_resumed:
            self._clear_blocks(row)
        self._append_blocks(row, cached.new_block_ids)
        self._counts["computed"][row] = cached.num_computed_tokens

    def _remove(self, key: RequestKey) -> None:
        # A request that was refused or aborted before its first step was never sent here.
        row = self._rows.pop(key, None)
        if row is not None:
            self._rules.pop(row, None)
            self._logprobs.pop(row, None)
            self._clear_blocks(row)
            self._free_rows.append(row)

    def _append_blocks(self, row: int, block_ids: BlockIds) -> None:
        if block_ids:
            start = int(self._counts["blocks"][row])
            end = start + len(block_ids[0])
            for table, group_ids in zip(self._blocks, block_ids, strict=True):
                table.ensure(0, end)
                table.values[row, start:end] = group_ids
            self._counts["blocks"][row] = end

    def _clear_blocks(self, row: int) -> None:
        """Back to the null block: entries past a sequence's last block are read, and masked."""
        for table in self._blocks:
            table.values[row, : self._counts["blocks"][row]] = 0
        self._counts["blocks"][row] = 0

    def _take_row(self) -> int:
        if not self._free_rows:
            num_rows = len(self._counts)
            self._free_rows.extend(reversed(range(num_rows, 2 * num_rows)))
            self._tokens.ensure(2 * num_rows, 0)
            for table in self._blocks:
                table.ensure(2 * num_rows, 0)
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._sampling = np.concatenate([self._sampling, np.zeros_like(self._sampling)])
        return self._free_rows.pop()

    def _prompt_rows(self, inputs: StepInputs, index: int, row: int) -> PromptRows | None:
        params = self._logprobs.get(row)
        if params is None or params.num_prompt is None:
            return None
        first_token, end_token = inputs.query_start_loc[index : index + 2]
        start = int(inputs.seq_lens[index] - (end_token - first_token))
        # The last prompt position says what comes after the prompt, which is output.
        num_rows = min(int(inputs.seq_lens[index]), int(self._counts["prompt"][row]) - 1) - start
        if num_rows <= 0:
            return None
        return PromptRows(
            key=inputs.keys[index],
            start=start,
            num_top=num_entries(params.num_prompt, self._vocab_size),
            logits_indices=np.arange(first_token, first_token + num_rows),
            token_ids=self._tokens.values[row, start + 1 : start + 1 + num_rows],
        )

    def _ruled_row(self, index: int, row: int) -> RuledRow:
        num_prompt, num_known = self._counts["prompt"][row], self._counts["known"][row]
        tokens = self._tokens.values[row]
        return RuledRow(index, self._rules[row], tokens[:num_prompt], tokens[num_prompt:num_known])


def _grammar_rows(inputs: StepInputs, bitmask: GrammarBitmask | None) -> GrammarRows | None:
    """The mask by rows of the logits; a mask for a request that does not sample in this step is left out."""
    if bitmask is None:
        return None
    row_of = {inputs.keys[index]: row for row, index in enumerate(inputs.sampled.tolist())}
    pairs = [(row_of[key], index) for index, key in enumerate(bitmask.keys) if key in row_of]
    if not pairs:
        return None
    rows, indices = np.array(pairs, dtype=np.int64).T
    return GrammarRows(rows, bitmask.words[indices])
