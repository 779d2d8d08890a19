"""A step's arrays on their way to the device. Pinned memory and events need a GPU and are not tested here."""

from __future__ import annotations

import numpy as np
import torch

from engine_core.model_executor.staging import Mirror, PackedCopies, copies_to, layout, stage
from fakes.decode_steps import BLOCK_SIZE, step_of

CPU = torch.device("cpu")


def arrays() -> list[np.ndarray]:
    return [
        np.arange(5, dtype=np.int64),
        np.arange(3, dtype=np.int32),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, :3],
        np.zeros(0, dtype=np.int64),
        np.array([7], dtype=np.int64),
    ]


def test_packed_copies_are_the_arrays():
    copies = PackedCopies(CPU)(arrays())
    for copy, array in zip(copies, arrays(), strict=True):
        assert copy.dtype == torch.from_numpy(array).dtype
        np.testing.assert_array_equal(copy.numpy(), array)
        assert copy.data_ptr() % 16 == 0


def test_packed_copies_share_no_memory_with_the_arrays():
    source = np.arange(4)
    [copy] = PackedCopies(CPU)([source])
    source[:] = 9
    assert copy.tolist() == [0, 1, 2, 3]


def test_a_step_that_is_too_large_gets_a_larger_buffer():
    copies = PackedCopies(CPU, num_bytes=64)
    large = np.arange(1000)
    assert copies([large])[0].tolist() == large.tolist()
    assert copies(arrays())[0].tolist() == [0, 1, 2, 3, 4]


def test_a_mirror_uploads_what_is_asked_for_only():
    mirror = Mirror(32, CPU)
    mirror.writable()[:] = 1
    mirror.upload(8, 16)
    assert mirror.on_device(0, torch.uint8, (32,)).tolist() == [0] * 8 + [1] * 8 + [0] * 16


def test_on_a_cpu_arrays_are_taken_as_they_are():
    source = np.arange(4)
    [tensor] = copies_to(CPU)([source])
    source[0] = 5
    assert tensor.tolist() == [5, 1, 2, 3]


def test_layout_is_aligned_and_disjoint():
    starts, end = layout([1, 64, 0, 65])
    assert starts == [0, 64, 128, 128]
    assert end == 193


def test_a_staged_step_is_the_step():
    inputs = step_of([(0, 9, 1), (1, 3, 5)], num_groups=2)
    for to_device in (copies_to(CPU), PackedCopies(CPU)):
        step = stage(inputs, inputs.logits_indices, BLOCK_SIZE, to_device)
        np.testing.assert_array_equal(step.input_ids.numpy(), inputs.input_ids)
        np.testing.assert_array_equal(step.positions.numpy(), inputs.positions)
        assert step.logits_indices.tolist() == [0, 5]
        assert len(step.metadata) == 2
        for index, metadata in enumerate(step.metadata):
            assert metadata.query_start_loc.tolist() == [0, 1, 6]
            assert metadata.seq_lens.tolist() == [10, 8]
            assert metadata.query_start_loc.dtype == metadata.seq_lens.dtype == torch.int32
            np.testing.assert_array_equal(metadata.block_tables.numpy(), inputs.block_tables[index])
            np.testing.assert_array_equal(metadata.slot_mapping.numpy(), inputs.slot_mappings[index])
            assert (metadata.max_query_len, metadata.max_seq_len) == (5, 10)
