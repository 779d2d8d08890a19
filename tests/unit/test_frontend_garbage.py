"""The frontend collects garbage between requests, and now and then when there is no between."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from frontend.garbage import MAX_INTERVAL_S, GarbageDuty


@pytest.fixture
def full_collections() -> Iterator[list[int]]:
    """Grows with each full collection; the collector is as before afterwards."""
    thresholds = gc.get_threshold()
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(1)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_no_full_collection_comes_by_itself(full_collections) -> None:
    GarbageDuty().begin(0.0)
    full_collections.clear()
    survivors = [[number] for number in range(200_000)]
    assert full_collections == []
    assert len(survivors) == 200_000


def test_one_when_work_has_ended_and_none_while_nothing_happens(full_collections) -> None:
    duty = GarbageDuty()
    duty.begin(0.0)
    full_collections.clear()
    for now, is_idle in ((1.0, True), (2.0, False), (3.0, False)):
        duty.tick(now, is_idle=is_idle)
    assert full_collections == []
    duty.tick(4.0, is_idle=True)
    duty.tick(5.0, is_idle=True)
    assert full_collections == [1]


def test_one_now_and_then_for_a_frontend_that_is_never_idle(full_collections) -> None:
    duty = GarbageDuty()
    duty.begin(0.0)
    full_collections.clear()
    duty.tick(MAX_INTERVAL_S - 1, is_idle=False)
    assert full_collections == []
    duty.tick(MAX_INTERVAL_S, is_idle=False)
    assert full_collections == [1]
