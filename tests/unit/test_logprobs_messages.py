"""Packed rows as messages: own token first, the rest most likely first, ranks only where they are known."""

from __future__ import annotations

from array import array

import pytest

from frontend.api.logprobs_messages import num_entries, to_token_logprobs
from frontend.generation_events import Admitted, ChoiceDelta, PromptReady
from stepwire.packed_logprobs import PackedLogprobs


def row(rank: int, *entries: tuple[int, float]) -> PackedLogprobs:
    ids, values = array("I", [entry[0] for entry in entries]), array("f", [entry[1] for entry in entries])
    return PackedLogprobs(len(entries), ids.tobytes(), values.tobytes(), array("I", [rank]).tobytes())


def convert(rows: PackedLogprobs, num_top: int) -> list[tuple[int, float, int | None]]:
    """The one row as (id, log-probability, rank or None), the own token first."""
    [message] = to_token_logprobs(rows, num_top, lambda token_id: bytes([token_id]))
    found = [message.sampled, *message.top]
    assert all(entry.token_bytes == bytes([entry.token_id]) for entry in found)
    return [(one.token_id, one.logprob, one.rank if one.HasField("rank") else None) for one in found]


def test_the_own_token_alone() -> None:
    assert convert(row(7, (5, -3.0)), 0) == [(5, -3.0, 7)]


def test_the_own_token_may_be_among_the_best() -> None:
    assert convert(row(2, (5, -1.0), (4, -0.5), (5, -1.0)), 2) == [(5, -1.0, 2), (4, -0.5, 1), (5, -1.0, 2)]


def test_equal_values_share_their_rank() -> None:
    found = convert(row(2, (3, -1.0), (1, -0.5), (2, -1.0), (3, -1.0), (4, -2.0)), 4)
    assert [rank for _, _, rank in found] == [2, 1, 2, 2, 4]


def test_chosen_ids_are_sorted_in_and_come_once() -> None:
    rows = row(9, (8, -6.0), (1, -0.5), (2, -1.0), (7, -9.0), (2, -1.0), (8, -6.0), (6, -5.0))
    assert convert(rows, 2)[1:] == [(1, -0.5, 1), (2, -1.0, 2), (6, -5.0, None), (8, -6.0, 9), (7, -9.0, None)]


def test_chosen_ids_alone() -> None:
    assert convert(row(1, (5, -0.5), (7, -9.0), (6, -2.0)), 0)[1:] == [(6, -2.0, None), (7, -9.0, None)]


def test_impossible_tokens_keep_their_infinity() -> None:
    assert convert(row(1, (5, 0.0), (5, 0.0), (6, float("-inf"))), 2)[2] == (6, float("-inf"), 2)


def test_rows_stay_apart() -> None:
    rows = PackedLogprobs.join([row(1, (1, -1.0), (2, -2.0)), row(3, (4, -4.0), (3, -3.0))])
    messages = list(to_token_logprobs(rows, 1, lambda token_id: b""))
    assert [(one.sampled.token_id, one.sampled.rank, one.top[0].token_id) for one in messages] == [(1, 1, 2), (4, 3, 3)]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (Admitted(), 0),
        (ChoiceDelta(0, "", (), 1), 0),
        (ChoiceDelta(0, "", (), 1, row(1, (1, 0.0), (2, 0.0))), 2),
        (PromptReady((row(1, (1, 0.0), (2, 0.0)), row(1, (1, 0.0), (2, 0.0))), 0), 4),
    ],
    ids=["admitted", "plain", "delta", "prompt"],
)
def test_number_of_entries(item, expected: int) -> None:
    assert num_entries(item) == expected
