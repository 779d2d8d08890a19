"""A step's arrays on the device: packed on the host, copied in one piece, and nobody waits.

Owner: the thread that runs the model. The host's memory is written again only when the device has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_core.model_executor.attention.metadata import AttentionMetadata, HostBatch
from engine_core.model_executor.step_inputs import StepInputs

# Kernels are compiled for pointers that are multiples of 16; a step must not bring others.
_ALIGNMENT = 64

ToDevice = Callable[[Sequence[np.ndarray]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """What the model reads of a step, on its device."""

    # int64 [T], [T], [S]
    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    # One for each group of layers.
    metadata: tuple[AttentionMetadata, ...]


class Mirror:
    """Bytes on the host, pinned where there is a GPU, and as many on the device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # torch's own

    def __len__(self) -> int:
        return len(self._host)

    def writable(self) -> np.ndarray:
        """The host's bytes, once the device has read what was uploaded last: as a rule long ago."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()

    def upload(self, start: int, end: int) -> None:
        self._device[start:end].copy_(self._host[start:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def on_device(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The device's bytes from `start` on, as a tensor."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        return self._device[start : start + num_bytes].view(dtype).view(shape)


class PackedCopies:
    """Copies the arrays of a step in one piece. The tensors are valid until the next call, in the device's order."""

    def __init__(self, device: torch.device, num_bytes: int = 1 << 20) -> None:
        self._device = device
        self._mirror = Mirror(num_bytes, device)

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        starts, end = layout([array.nbytes for array in arrays])
        if end > len(self._mirror):
            self._mirror = Mirror(2 * end, self._device)
        host = self._mirror.writable()
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._mirror.upload(0, end)
        return [
            self._mirror.on_device(start, torch.from_numpy(array[:0]).dtype, array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]


def copies_to(device: torch.device) -> ToDevice:
    """How arrays come to this device. On a CPU they are there."""
    if device.type == "cpu":
        return lambda arrays: [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    return PackedCopies(device)


def stage(inputs: StepInputs, logits_indices: np.ndarray, block_size: int, to_device: ToDevice) -> StagedStep:
    num_groups = len(inputs.block_tables)
    arrays = [
        inputs.input_ids,
        inputs.positions,
        logits_indices,
        inputs.query_start_loc.astype(np.int32, copy=False),
        inputs.seq_lens.astype(np.int32, copy=False),
        *(table.astype(np.int32, copy=False) for table in inputs.block_tables),
        *inputs.slot_mappings,
    ]
    input_ids, positions, indices, query_start_loc, seq_lens, *of_groups = to_device(arrays)
    metadata = tuple(
        AttentionMetadata(
            slot_mapping=of_groups[num_groups + group],
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=of_groups[group],
            max_query_len=int(np.diff(inputs.query_start_loc).max(initial=0)),
            max_seq_len=int(inputs.seq_lens.max(initial=0)),
            block_size=block_size,
            host=HostBatch(inputs.query_start_loc, inputs.seq_lens, inputs.prompt_lens, inputs.block_tables[group]),
            group=group,
        )
        for group in range(num_groups)
    )
    return StagedStep(input_ids, positions, indices, metadata)


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where pieces of these sizes begin, aligned, and where the last one ends."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end
