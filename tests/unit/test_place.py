"""Ranks, shards and stages: every layer is in exactly one stage, and exactly one worker samples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_executor.parallel.place import Place


def places(shards: int, stages: int) -> list[Place]:
    return [Place(rank, shards, stages) for rank in range(shards * stages)]


@given(shards=st.integers(1, 4), stages=st.integers(1, 5), num_layers=st.integers(5, 40))
def test_each_shard_of_the_stages_has_all_layers_once_and_in_order(shards, stages, num_layers):
    for shard in range(shards):
        of_shard = [place for place in places(shards, stages) if place.shard == shard]
        assert [place.stage for place in of_shard] == list(range(stages))
        assert [layer for place in of_shard for layer in place.layers(num_layers)] == list(range(num_layers))
        sizes = [len(place.layers(num_layers)) for place in of_shard]
        assert max(sizes) - min(sizes) <= 1
        # The output matrix is work for the last one too.
        assert sizes[-1] == min(sizes)


@given(shards=st.integers(1, 4), stages=st.integers(1, 5))
def test_the_leader_is_the_first_shard_of_the_last_stage(shards, stages):
    [leader] = [place for place in places(shards, stages) if place.is_leader]
    assert (leader.shard, leader.is_last_stage) == (0, True)
    assert {place.leader for place in places(shards, stages)} == {leader.rank}
    assert sum(place.is_first_stage for place in places(shards, stages)) == shards
