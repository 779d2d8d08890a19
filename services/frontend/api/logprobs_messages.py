"""Packed log-probabilities as messages of the public API. Pure; large ones are for a thread, not for the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from frontend.generation_events import ChoiceDelta, CollectorItem, PromptReady
from stepwire.packed_logprobs import PackedLogprobs
from stepwire.v1 import common_pb2

# A microsecond each.
MAX_ENTRIES_ON_LOOP = 2_000
# About half of the largest message there may be.
MAX_ENTRIES_OF_ANSWER = 1_500_000

_Entry = tuple[int, float, int | None]


def num_entries(item: CollectorItem) -> int:
    """Messages that an item becomes: what decides where it is converted."""
    if isinstance(item, ChoiceDelta):
        return size_of(item.logprobs)
    return sum(map(size_of, item.logprobs)) if isinstance(item, PromptReady) else 0


def to_token_logprobs(
    rows: PackedLogprobs, num_top: int, token_bytes: Callable[[int], bytes]
) -> Iterator[common_pb2.TokenLogprobs]:
    """One message a row: the position's own token, then the `num_top` most likely and the chosen ones, best first."""
    token_ids, logprobs, ranks = rows.unpack()
    for row, rank in enumerate(ranks):
        start, end = row * rows.width, (row + 1) * rows.width
        own = (token_ids[start], logprobs[start], rank)
        ids, values = token_ids[start + 1 : end], logprobs[start + 1 : end]
        entries = _ranked(ids[:num_top], values[:num_top])
        if num_top < len(ids):
            entries = _with_chosen(entries, ids[num_top:], values[num_top:], own)
        yield common_pb2.TokenLogprobs(
            sampled=_logprob(own, token_bytes), top=[_logprob(entry, token_bytes) for entry in entries]
        )


def _ranked(ids: list[int], values: list[float]) -> list[_Entry]:
    """Rank = number of larger ones + 1, so equal values share it."""
    entries: list[_Entry] = []
    rank, last = 0, None
    for place, (token_id, value) in enumerate(zip(ids, values, strict=True), start=1):
        if value != last:
            rank, last = place, value
        entries.append((token_id, value, rank))
    return entries


def _with_chosen(top: list[_Entry], ids: list[int], values: list[float], own: _Entry) -> list[_Entry]:
    """Add what is not there yet. Of a chosen token outside the top the rank is not known, unless it is the own one."""
    known = {token_id for token_id, _, _ in top}
    added: list[_Entry] = [
        (token_id, value, own[2] if token_id == own[0] else None)
        for token_id, value in zip(ids, values, strict=True)
        if token_id not in known
    ]
    return sorted([*top, *added], key=lambda entry: -entry[1])


def _logprob(entry: _Entry, token_bytes: Callable[[int], bytes]) -> common_pb2.Logprob:
    token_id, logprob, rank = entry
    return common_pb2.Logprob(token_id=token_id, logprob=logprob, rank=rank, token_bytes=token_bytes(token_id))


def size_of(rows: PackedLogprobs | None) -> int:
    """Entries of packed rows."""
    return rows.width * rows.num_rows if rows is not None else 0
