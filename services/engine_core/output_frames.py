"""Cuts the outputs of a batch into frames of bounded size: a frontend must not wait for one huge message.

Pure; called by output threads, after coalescing and before encoding. What grows without a natural bound are
log-probabilities: of a whole prompt, and of many tokens for a frontend that is behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine_core.scheduler.output import EngineCoreOutput, EngineCoreOutputs

MAX_FRAME_BYTES = 4 * 2**20
# Rough wire sizes; the limit keeps frames small, it is not an account.
_OUTPUT_BYTES = 24
_TOKEN_BYTES = 4


def size_of(output: EngineCoreOutput) -> int:
    """About as many bytes as on the wire."""
    size = _OUTPUT_BYTES + _TOKEN_BYTES * len(output.new_token_ids) + len(output.pooled or b"")
    for rows in (output.logprobs, output.prompt_logprobs):
        size += rows.num_bytes if rows is not None else 0
    return size


def size_of_all(outputs: Sequence[EngineCoreOutput]) -> int:
    """The same for many, most of which are one token and nothing else."""
    size = _OUTPUT_BYTES * len(outputs) + _TOKEN_BYTES * sum([len(output.new_token_ids) for output in outputs])
    rows = [rows for output in outputs for rows in (output.logprobs, output.prompt_logprobs) if rows is not None]
    return size + sum(part.num_bytes for part in rows) + sum([len(one.pooled) for one in outputs if one.pooled])


def cut(batch: EngineCoreOutputs, max_bytes: int = MAX_FRAME_BYTES) -> Iterator[EngineCoreOutputs]:
    """The batch as one frame, or as several in order; the stats are in the last one.

    A frame is larger than the limit only where one row, or one vector, is.
    """
    if size_of_all(batch.outputs) <= max_bytes:
        yield batch
        return
    outputs: list[EngineCoreOutput] = []
    num_bytes = 0
    for piece in (piece for output in batch.outputs for piece in _pieces(output, max_bytes)):
        size = size_of(piece)
        if outputs and num_bytes + size > max_bytes:
            yield replace(batch, outputs=outputs, stats=None)
            outputs, num_bytes = [], 0
        outputs.append(piece)
        num_bytes += size
    yield replace(batch, outputs=outputs)


def _pieces(output: EngineCoreOutput, max_bytes: int) -> Iterator[EngineCoreOutput]:
    """Prompt rows, then tokens with theirs. Events come with the first piece, the finish with the last."""
    if size_of(output) <= max_bytes or output.pooled is not None:
        yield output
        return
    pieces = [*_prompt_pieces(output, max_bytes), *_token_pieces(output, max_bytes)]
    pieces[0].events, pieces[0].prefill = output.events, output.prefill
    pieces[-1].finish = output.finish
    yield from pieces


def _prompt_pieces(output: EngineCoreOutput, max_bytes: int) -> Iterator[EngineCoreOutput]:
    rows = output.prompt_logprobs
    if rows is not None:
        step = max(1, (max_bytes - _OUTPUT_BYTES) // rows.row_bytes)
        for start in range(0, rows.num_rows, step):
            part = rows.rows(start, min(start + step, rows.num_rows))
            yield EngineCoreOutput(output.key, prompt_logprobs=part)


def _token_pieces(output: EngineCoreOutput, max_bytes: int) -> Iterator[EngineCoreOutput]:
    rows, token_ids = output.logprobs, output.new_token_ids
    step = max(1, (max_bytes - _OUTPUT_BYTES) // (_TOKEN_BYTES + (rows.row_bytes if rows is not None else 0)))
    for start in range(0, len(token_ids), step):
        end = min(start + step, len(token_ids))
        part = rows.rows(start, end) if rows is not None else None
        yield EngineCoreOutput(output.key, token_ids[start:end], logprobs=part)
