"""The worker's own record of its requests, kept up to date by differences, and the arrays of a step made from it.

Owner: the busy-loop thread. The scheduler sends a request whole once; afterwards only new blocks. Sampled tokens are
appended here and are not sent back. Rows are reused; a key is never reused. The running batch is an array of rows that
changes when other requests run: a step of the same requests looks up no key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_core.kv_cache.kv_cache_manager import BlockIds
from engine_core.model_executor.block_table import BlockTable
from engine_core.model_executor.pooling import PooledChunk, PoolingRows
from engine_core.model_executor.row_table import RowTable
from engine_core.model_executor.sampler.logprobs import PromptRows, SampledRow
from engine_core.model_executor.sampler.sampling_batch import GrammarRows, SamplingBatch
from engine_core.model_executor.sampling_rows import SamplingRows
from engine_core.model_executor.step_arrays import StepArrays
from engine_core.model_executor.step_inputs import StepInputs
from engine_core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from engine_core.scheduler.request import RequestKey
from engine_core.structured_output.bitmask import GrammarBitmask
from stepwire.packed_logprobs import num_entries

_INITIAL_COLUMNS = 256
_NOT_IN_BATCH = -1


class InputBatch:
    """Tokens, block tables, counts and sampling parameters of every request the worker knows."""

    def __init__(self, max_num_seqs: int, block_size: int, vocab_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._rows: dict[RequestKey, int] = {}
        # Preempted requests keep their row, so there may be more rows than max_num_seqs.
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._tokens = RowTable(max_num_seqs, _INITIAL_COLUMNS)
        num_blocks = _INITIAL_COLUMNS // block_size + 1
        # One for each group of layers; a row has as many blocks in each.
        self._blocks = [BlockTable(max_num_seqs, num_blocks) for _ in range(num_groups)]
        # By row: tokens of the prompt, known tokens, computed tokens, blocks.
        self._num_prompt, self._num_known, self._num_computed, self._num_blocks = np.zeros(
            (4, max_num_seqs), dtype=np.int64
        )
        self._sampling = SamplingRows(max_num_seqs, vocab_size)
        self._pooling = PoolingRows()
        self._arrays = StepArrays(max_num_seqs, num_groups)
        # The running batch, its rows, and the place of each row in it.
        self._keys: list[RequestKey] = []
        self._batch_rows = np.zeros(0, dtype=np.int64)
        self._places = np.full(max_num_seqs, _NOT_IN_BATCH, dtype=np.int64)
        self._must_gather = False

    def __len__(self) -> int:
        return len(self._rows)

    def known_token_ids(self, key: RequestKey) -> list[int]:
        """Prompt and output of a request."""
        row = self._rows[key]
        token_ids: list[int] = self._tokens.values[row, : self._num_known[row]].tolist()
        return token_ids

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Apply the differences of one step: finished, then new, then changed requests."""
        for key in scheduler_output.finished_keys:
            self._remove(key)
        for new in scheduler_output.new_requests:
            self._add(new)
        for cached in scheduler_output.cached_requests:
            self._change(cached)

    def prepare(self, num_scheduled_tokens: dict[RequestKey, int]) -> StepInputs:
        """The arrays of a step, by array operations over all rows at once. Valid until the next call."""
        self._take_batch(list(num_scheduled_tokens))
        rows, arrays, computed = self._batch_rows, self._arrays, self._num_computed[self._batch_rows]
        num_tokens = sum(num_scheduled_tokens.values())
        if num_tokens == len(rows):
            token_rows, query_start_loc, positions = arrays.of_decodes(rows, computed)
        else:
            query_lens = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(rows))
            token_rows, query_start_loc, positions = arrays.of_queries(rows, computed, query_lens)
        seq_lens = arrays.seq_lens(computed, query_start_loc)
        is_sampled = seq_lens == self._num_known[rows]
        if self._pooling:
            is_sampled &= ~self._pooling.are_in(rows)
        sampled = arrays.places_of(is_sampled)
        return StepInputs(
            keys=self._keys,
            rows=rows,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            prompt_lens=arrays.prompt_lens(self._num_prompt[rows]),
            block_tables=tuple(table.of_batch for table in self._blocks),
            input_ids=arrays.input_ids(self._tokens, token_rows, positions),
            positions=positions,
            slot_mappings=arrays.slot_mappings(self._blocks, token_rows, positions, self._block_size),
            sampled=sampled,
            logits_indices=arrays.last_tokens(query_start_loc, sampled),
        )

    def sampling_batch(self, inputs: StepInputs, bitmask: GrammarBitmask | None = None) -> SamplingBatch | None:
        """Parameters, rules and grammar masks of the sampled sequences that have some; None = there are none."""
        rows = inputs.sampled_rows
        is_special = self._sampling.is_special[rows]
        masks = _masks(inputs, bitmask) if bitmask is not None else []
        is_special[[place for place, _ in masks]] = True
        if not is_special.any():
            return None
        places = np.flatnonzero(is_special)
        rows = rows[places]
        num_outputs = self._num_known[rows] - self._num_prompt[rows]
        return SamplingBatch(
            rows=places,
            params=self._sampling.params[rows],
            token_indices=num_outputs,
            ruled_rows=self._sampling.ruled_rows(rows, num_outputs, self._output_of),
            grammar=_grammar_rows(places, masks, bitmask) if bitmask is not None and masks else None,
        )

    def sampled_logprobs(self, inputs: StepInputs) -> list[SampledRow]:
        """The sampled sequences whose log-probabilities are wanted."""
        logprobs = self._sampling.logprobs
        if not logprobs:
            return []
        wanted = [(index, logprobs[row]) for index, row in enumerate(inputs.sampled_rows.tolist()) if row in logprobs]
        return [
            SampledRow(index, inputs.keys[inputs.sampled[index]], params)
            for index, params in wanted
            if params.has_output
        ]

    def prompt_logprobs(self, inputs: StepInputs) -> list[PromptRows]:
        """The computed parts of prompts whose log-probabilities are wanted."""
        if not self._sampling.logprobs:
            return []
        found = (self._prompt_rows(inputs, index, row) for index, row in enumerate(inputs.rows.tolist()))
        return [rows for rows in found if rows is not None]

    def pooled_chunks(self, inputs: StepInputs) -> list[PooledChunk]:
        """The computed parts of prompts that are pooled."""
        return self._pooling.chunks(inputs, self._num_known) if self._pooling else []

    def finish_step(self, inputs: StepInputs, sampled_token_ids: np.ndarray | Sequence[int]) -> None:
        """Count the step's tokens as computed and append the sampled ones, in the order of `inputs.sampled`."""
        self.count_computed(inputs)
        self.append_sampled(inputs, sampled_token_ids)

    def count_computed(self, inputs: StepInputs) -> None:
        """Before the next step is prepared."""
        self._num_computed[inputs.rows] = inputs.seq_lens

    def append_sampled(self, inputs: StepInputs, sampled_token_ids: np.ndarray | Sequence[int]) -> None:
        """May be told later than the step, but before one that needs the tokens."""
        rows = inputs.sampled_rows
        if rows.size:
            known = self._num_known[rows]
            self._tokens.ensure(0, int(known.max()) + 1)
            self._tokens.values.ravel()[self._tokens.places(rows, known)] = sampled_token_ids
            known += 1
            self._num_known[rows] = known

    def _take_batch(self, keys: list[RequestKey]) -> None:
        """These requests run now."""
        # Nearly always the same objects as in the last step, which costs some ns each.
        if keys != self._keys:
            self._places[self._batch_rows] = _NOT_IN_BATCH
            self._batch_rows = np.fromiter(map(self._rows.__getitem__, keys), dtype=np.int64, count=len(keys))
            self._places[self._batch_rows] = np.arange(len(keys))
            self._keys = keys
            self._must_gather = True
        if self._must_gather:
            num_columns = int(self._num_blocks[self._batch_rows].max(initial=0))
            for table in self._blocks:
                table.gather(self._batch_rows, num_columns)
            self._must_gather = False

    def _add(self, new: NewRequestData) -> None:
        row = self._take_row()
        self._rows[new.key] = row
        known = [*new.prompt_token_ids, *new.output_token_ids]
        self._tokens.ensure(0, len(known) + 1)
        self._tokens.values[row, : len(known)] = known
        self._num_prompt[row], self._num_known[row] = len(new.prompt_token_ids), len(known)
        self._num_computed[row], self._num_blocks[row] = new.num_computed_tokens, 0
        self._sampling.add(row, new)
        self._pooling.add(row, new)
        self._append_blocks(row, new.block_ids)

    def _change(self, cached: CachedRequestData) -> None:
        row = self._rows[cached.key]
        if cached.is_resumed:
            self._clear_blocks(row)
        self._append_blocks(row, cached.new_block_ids)
        self._num_computed[row] = cached.num_computed_tokens

    def _remove(self, key: RequestKey) -> None:
        # A request that was refused or aborted before its first step was never sent here.
        row = self._rows.pop(key, None)
        if row is not None:
            self._sampling.remove(row)
            self._pooling.remove(row)
            self._clear_blocks(row)
            self._free_rows.append(row)
            if self._places[row] != _NOT_IN_BATCH:
                self._leave_batch()

    def _leave_batch(self) -> None:
        """Its rows are looked up anew: one of them may be another request's soon."""
        self._places[self._batch_rows] = _NOT_IN_BATCH
        self._keys, self._batch_rows = [], self._batch_rows[:0]

    def _append_blocks(self, row: int, block_ids: BlockIds) -> None:
        if block_ids:
            start, place = int(self._num_blocks[row]), int(self._places[row])
            for table, group_ids in zip(self._blocks, block_ids, strict=True):
                table.write(row, start, group_ids, place)
            self._num_blocks[row] = end = start + len(block_ids[0])
            self._must_gather |= place != _NOT_IN_BATCH and end > self._blocks[0].of_batch.shape[1]

    def _clear_blocks(self, row: int) -> None:
        for table in self._blocks:
            table.clear(row, int(self._num_blocks[row]))
        self._num_blocks[row] = 0
        self._must_gather = True

    def _take_row(self) -> int:
        if not self._free_rows:
            num_rows = len(self._num_known)
            self._free_rows.extend(reversed(range(num_rows, 2 * num_rows)))
            self._tokens.ensure(2 * num_rows, 0)
            for table in self._blocks:
                table.ensure_rows(2 * num_rows)
            self._sampling.ensure_rows(2 * num_rows)
            counts = np.stack([self._num_prompt, self._num_known, self._num_computed, self._num_blocks])
            grown = np.concatenate([counts, np.zeros_like(counts)], axis=1)
            self._num_prompt, self._num_known, self._num_computed, self._num_blocks = grown
            self._places = np.concatenate([self._places, np.full(num_rows, _NOT_IN_BATCH)])
        return self._free_rows.pop()

    def _prompt_rows(self, inputs: StepInputs, index: int, row: int) -> PromptRows | None:
        params = self._sampling.logprobs.get(row)
        if params is None or params.num_prompt is None:
            return None
        first_token, end_token = inputs.query_start_loc[index : index + 2].tolist()
        start = int(inputs.seq_lens[index]) - (end_token - first_token)
        # The last prompt position says what comes after the prompt, which is output.
        num_rows = min(int(inputs.seq_lens[index]), int(self._num_prompt[row]) - 1) - start
        if num_rows <= 0:
            return None
        return PromptRows(
            key=inputs.keys[index],
            start=start,
            num_top=num_entries(params.num_prompt, self._vocab_size),
            logits_indices=np.arange(first_token, first_token + num_rows),
            token_ids=self._tokens.values[row, start + 1 : start + 1 + num_rows],
        )

    def _output_of(self, row: int) -> np.ndarray:
        output: np.ndarray = self._tokens.values[row, self._num_prompt[row] : self._num_known[row]]
        return output


def _masks(inputs: StepInputs, bitmask: GrammarBitmask) -> list[tuple[int, int]]:
    """(row of the logits, row of the mask); a mask for a request that does not sample in this step is left out."""
    row_of = {inputs.keys[index]: row for row, index in enumerate(inputs.sampled.tolist())}
    return [(row_of[key], index) for index, key in enumerate(bitmask.keys) if key in row_of]


def _grammar_rows(places: np.ndarray, masks: list[tuple[int, int]], bitmask: GrammarBitmask) -> GrammarRows:
    """The masks by their place among the rows of a sampling batch."""
    rows, indices = np.array(masks, dtype=np.int64).T
    return GrammarRows(np.searchsorted(places, rows), bitmask.words[indices])
