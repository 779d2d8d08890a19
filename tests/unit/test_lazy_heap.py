"""LazyHeap: the order of a sorted list under random moves, and what has left does not gather behind what stays."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.scheduler.lazy_heap import SLACK, LazyHeap


@settings(derandomize=True, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["put", "put", "remove"]), st.integers(0, 5), st.integers(0, 9))))
def test_the_first_is_the_least_that_is_there(moves: list[tuple[str, int, int]]):
    heap: LazyHeap[int, int] = LazyHeap()
    # Key -> (order, when it was put): a move is put anew.
    model: dict[int, tuple[int, int]] = {}
    for number, (move, key, order) in enumerate(moves):
        if move == "put":
            heap.put(key, (order,), key)
            model[key] = (order, number)
        elif key in model:
            heap.remove(key)
            del model[key]
        assert heap.first() == (min(model, key=model.__getitem__) if model else None)
        assert [heap.get(key) is not None for key in range(6)] == [key in model for key in range(6)]
        assert len(heap) == len(model)


def test_a_stranger_is_refused():
    with pytest.raises(KeyError):
        LazyHeap().remove(1)


class Key:
    """Can be watched."""


def test_keys_that_left_do_not_gather():
    heap: LazyHeap[object, None] = LazyHeap()
    heap.put("stays first", (0,), None)
    alive: weakref.WeakSet[Key] = weakref.WeakSet()
    for _ in range(10 * SLACK):
        key = Key()
        alive.add(key)
        heap.put(key, (1,), None)
        heap.remove(key)
    del key
    gc.collect()
    assert len(alive) <= 2 * SLACK
