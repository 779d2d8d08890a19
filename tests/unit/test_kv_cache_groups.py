"""Which layers share a block table, and which their tensors."""

from __future__ import annotations

import pytest

from engine_core.model_executor.attention.kv_cache import LayerSpec
from engine_core.model_executor.kv_cache_groups import LayerGroup, group_layers, tensor_specs

SPEC, OTHER = LayerSpec(2, 8, 8), LayerSpec(1, 16, 16)


def groups_of(
    windows: list[int | None], specs: list[LayerSpec] | None = None
) -> list[tuple[tuple[int, ...], int | None]]:
    numbered = dict(enumerate(specs or [SPEC] * len(windows)))
    return [(group.layers, group.sliding_window) for group in group_layers(numbered, dict(enumerate(windows)), 1000)]


@pytest.mark.parametrize("window", [None, 6])
def test_layers_of_one_kind_are_one_group(window: int | None) -> None:
    assert groups_of([window] * 3) == [((0, 1, 2), window)]
    # Their KV may be of any size: no tensor is shared.
    assert groups_of([window] * 2, [SPEC, OTHER]) == [((0, 1), window)]


def test_the_more_frequent_kind_is_split() -> None:
    windows = [6, 6, None, 6, 6, None, 6]
    assert groups_of(windows) == [((0, 1), 6), ((3, 4), 6), ((6,), 6), ((2, 5), None)]


def test_nearly_equal_kinds_are_padded_and_not_split() -> None:
    assert groups_of([6, None, 6, None, 6]) == [((0, 2, 4), 6), ((1, 3), None)]


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    assert groups_of([1000, None]) == [((0, 1), None)]
    assert groups_of([999, None]) == [((0,), 999), ((1,), None)]


def test_layers_that_can_not_share_tensors_keep_all_tokens() -> None:
    assert groups_of([6, None, 6], [SPEC, OTHER, SPEC]) == [((0, 1, 2), None)]


def test_one_tensor_for_each_place_in_a_group() -> None:
    groups = (LayerGroup((0,), 6), LayerGroup((1, 2), None))
    assert tensor_specs(groups, {0: SPEC, 1: SPEC, 2: SPEC}) == [SPEC, SPEC]
    assert tensor_specs((LayerGroup((3, 4), None),), {3: SPEC, 4: OTHER}) == [SPEC, OTHER]
