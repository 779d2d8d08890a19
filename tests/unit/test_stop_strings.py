"""Stop strings against a dumb search of the whole text, and the hold-back that keeps ids and text together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.stop_strings import HeldTokens, StopMatcher


def reference(pieces, stops, include_stop) -> tuple[int, str, str] | None:
    """(pieces needed, text kept, stop): search everything after each piece, the first listed stop wins."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        text += piece
        for stop in stops:
            found = text.find(stop)
            if found >= 0:
                return count, text[: found + len(stop)] if include_stop else text[:found], stop
    return None


def run(pieces, stops, include_stop) -> tuple[list[tuple[str, list[int]]], tuple[int, str, str] | None]:
    """Feed pieces as tokens 0, 1, 2 ...; returns the deltas and what ended them."""
    matcher = StopMatcher(stops, include_stop=include_stop)
    held = HeldTokens(matcher.num_held_chars)
    deltas = []
    for index, piece in enumerate(pieces):
        held.append(index, piece, is_unfinished=False)
        hit = matcher.feed(piece)
        if hit is not None:
            held.cut(hit.num_excess_chars)
            deltas.append(held.drain())
            return deltas, (index + 1, "".join(text for text, _ in deltas), hit.stop)
        deltas.append(held.release())
    deltas.append(held.drain())
    return deltas, None


pieces_of_text = st.lists(st.text(alphabet="ab", max_size=4), max_size=25)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(pieces_of_text, stop_lists, st.booleans())
def test_equals_a_search_of_the_whole_text(pieces, stops, include_stop) -> None:
    deltas, end = run(pieces, stops, include_stop)
    assert end == reference(pieces, stops, include_stop)
    if end is None:
        assert "".join(text for text, _ in deltas) == "".join(pieces)


@pytest.mark.regression(17)
@given(pieces_of_text, stop_lists, st.booleans())
def test_ids_and_text_of_each_delta_agree(pieces, stops, include_stop) -> None:
    deltas, end = run(pieces, stops, include_stop)
    *whole, last = deltas
    for text, ids in whole:
        assert text == "".join(pieces[index] for index in ids)
    # Only the last token before a cut may show less than it holds.
    text, ids = last
    assert "".join(pieces[index] for index in ids).startswith(text)
    assert end is not None or text == "".join(pieces[index] for index in ids)
    ids_in_order = [index for _, delta in deltas for index in delta]
    assert ids_in_order == list(range(len(ids_in_order)))


@pytest.mark.parametrize(("stops", "stop", "kept"), [(["a", "b"], "a", "xxb"), (["b", "a"], "b", "xx")])
def test_the_first_listed_stop_wins_inside_one_token(stops, stop, kept) -> None:
    _, end = run(["x", "xba"], stops, include_stop=False)
    assert end == (2, kept, stop)


def test_include_stop_keeps_it_and_cuts_what_follows() -> None:
    deltas, end = run(["say ST", "OP now", " more"], ["STOP"], include_stop=True)
    assert end == (2, "say STOP", "STOP")
    # Nothing is held when the stop itself may be shown.
    assert deltas[0] == ("say ST", [0])


def test_hold_back_is_rounded_to_whole_tokens() -> None:
    deltas, end = run(["one ", "two ", "three"], ["<stop/>"], include_stop=False)
    assert end is None
    assert deltas == [("", []), ("", []), ("one ", [0]), ("two three", [1, 2])]


def test_token_cut_to_nothing_leaves_no_id() -> None:
    deltas, _ = run(["ab", "ST", "OP"], ["STOP"], include_stop=False)
    assert deltas[-1] == ("ab", [0])


def test_tokens_of_one_character_leave_together() -> None:
    held = HeldTokens(1)
    held.append(7, "", is_unfinished=True)
    held.append(8, "é", is_unfinished=False)
    assert held.release() == ("", [])
    held.append(9, "x", is_unfinished=False)
    assert held.release() == ("é", [7, 8])
    assert held.drain() == ("x", [9])


def test_endless_unfinished_text_still_flows() -> None:
    held = HeldTokens(0)
    released = []
    for index in range(20):
        held.append(index, "\ufffd", is_unfinished=True)
        released += held.release()[1]
    assert released == list(range(16))


def test_rest_of_the_text_belongs_to_the_tokens_that_are_there() -> None:
    held = HeldTokens(0)
    held.append(7, "", is_unfinished=True)
    held.append_rest("\ufffd")
    assert held.drain() == ("\ufffd", [7])
