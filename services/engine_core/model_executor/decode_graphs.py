"""Decode steps as CUDA graphs: the whole forward pass of a batch of one size is recorded once, and then replayed.

A batch is padded to the next size that is recorded. What pads it writes to the null block and sees one key of it. Steps
with a longer query run eagerly. Owner: the thread that runs the model. How a pass is recorded is injected: on a CPU the
twin runs the pass itself on the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata, HostBatch
from engine_core.model_executor.attention.paged_attention import PagedAttention
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.loader import LoadedModel
from engine_core.model_executor.model_cache import Progress
from engine_core.model_executor.models.backend import ModelBackend
from engine_core.model_executor.models.support import context_limit
from engine_core.model_executor.parallel.worker_group import WorkerGroup
from engine_core.model_executor.staging import Mirror, layout
from engine_core.model_executor.step_inputs import StepInputs

_SMALL_SIZES = (1, 2, 4, 8, 16)
_SIZE_STEP = 8
# Kernels that read nothing of a step from the host.
_RECORDABLE = frozenset({"triton"})
# A recorded pass has no arrays on the host.
_NO_HOST = HostBatch(*(np.zeros(0, dtype=np.int32) for _ in range(4)))

Pass = Callable[[], None]
# Takes a forward pass, whose tensors stay where they are, and returns what repeats it.
Record = Callable[[Pass], Pass]


class CudaRecorder:
    """Records CUDA graphs that share their memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Pass) -> Pass:
        # Once outside: kernels are compiled, libraries take their workspaces.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            forward()
        replay: Pass = graph.replay
        return replay


class DecodeGraphs:
    """Recorded decode steps of up to `max_num_seqs` sequences."""

    def __init__(
        self,
        backend: ModelBackend,
        kernels: Kernels,
        device: torch.device,
        record: Record,
        *,
        dtype: torch.dtype,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        self._backend, self._kernels, self._record = backend, kernels, record
        self._sizes = graph_sizes(max_num_seqs)
        self._max_model_len, self._block_size = max_model_len, block_size
        self._buffers = StaticBuffers(
            self._sizes[-1], -(-max_model_len // block_size), len(backend.layer_groups), device
        )
        # One for all sizes, because each would be large.
        self._logits = torch.zeros(self._sizes[-1], backend.vocab_size, dtype=dtype, device=device)
        self._replays: dict[int, Pass] = {}
        # Those that the recordings read and write.
        self._caches: Mapping[int, LayerKVCache] | None = None

    @torch.inference_mode()
    def capture(self, caches: Mapping[int, LayerKVCache], progress: Progress) -> None:
        """Record all sizes over these caches, the largest first, whose memory the others then share."""
        self.drop()
        self._caches = caches
        for count, size in enumerate(reversed(self._sizes), start=1):
            progress(f"recording CUDA graphs: {count} of {len(self._sizes)}")
            self._replays[size] = self._record(self._forward_of(size, caches))

    def drop(self) -> None:
        """Forget the recordings: caches or weights are about to move. The next step that fits records again."""
        self._replays, self._caches = {}, None

    def fits(self, inputs: StepInputs) -> bool:
        """Whether a recording can do this step: decodes only, not too many, none too long."""
        num_sequences, num_columns = inputs.block_tables[0].shape
        is_decode = len(inputs.input_ids) == num_sequences
        is_small = num_sequences <= self._sizes[-1] and num_columns <= self._buffers.num_columns
        return bool(is_decode and is_small)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: Mapping[int, LayerKVCache]) -> torch.Tensor:
        """A step that fits -> logits [S, vocab_size] of its sampled sequences, valid until the next one."""
        if caches is not self._caches:
            self.capture(caches, lambda _: None)
        num_sequences = len(inputs.input_ids)
        size = self._size_for(num_sequences)
        self._buffers.fill(inputs, size)
        self._replays[size]()
        if len(inputs.sampled) == num_sequences:
            return self._logits[:num_sequences]
        return self._logits[torch.from_numpy(inputs.sampled).to(self._logits.device, non_blocking=True)]

    def repeat(self, num_sequences: int) -> None:
        """The latest step of so many sequences once more, with nothing from the host: what the device alone takes."""
        self._replays[self._size_for(num_sequences)]()

    def _size_for(self, num_sequences: int) -> int:
        return next(size for size in self._sizes if size >= num_sequences)

    def _forward_of(self, size: int, caches: Mapping[int, LayerKVCache]) -> Pass:
        buffers = self._buffers
        buffers.clear()
        metadata: dict[int, AttentionMetadata] = {}
        for index, group in enumerate(self._backend.layer_groups):
            of_group = AttentionMetadata(
                slot_mapping=buffers.slot_mappings[index][:size],
                query_start_loc=buffers.query_start_loc[: size + 1],
                seq_lens=buffers.seq_lens[:size],
                block_tables=buffers.block_tables[index][:size],
                max_query_len=1,
                # The longest there will be: how the work is cut must fit every later step.
                max_seq_len=self._max_model_len,
                block_size=self._block_size,
                host=_NO_HOST,
            )
            metadata.update(dict.fromkeys(group.layers, of_group))
        context = PagedAttention(caches, metadata, self._kernels)

        def forward() -> None:
            logits = self._backend.forward(
                buffers.input_ids[:size], buffers.positions[:size], buffers.all_rows[:size], context
            )
            self._logits[:size].copy_(logits)

        return forward


class StaticBuffers:
    """The inputs of all recordings, at addresses that never change: up to `size` sequences of one token each."""

    def __init__(self, size: int, num_columns: int, num_groups: int, device: torch.device) -> None:
        self.num_columns = num_columns
        # input_ids, positions and slots, then seq_lens; behind them the tables as wide as a step needs them.
        sizes = [size * 8] * (2 + num_groups) + [size * 4] + [size * num_columns * 4] * num_groups
        starts, end = layout(sizes)
        self._starts, self._tables_start = starts[:-num_groups], starts[-num_groups]
        self._mirror = Mirror(end, device)
        rows = [self._mirror.on_device(start, torch.int64, (size,)) for start in self._starts[:-1]]
        self.input_ids, self.positions, *self.slot_mappings = rows
        self.seq_lens = self._mirror.on_device(self._starts[-1], torch.int32, (size,))
        self.block_tables = [
            torch.zeros(size, num_columns, dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self.query_start_loc = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.all_rows = torch.arange(size, device=device)

    def clear(self) -> None:
        """All rows are padding."""
        for row in (self.input_ids, self.positions, *self.slot_mappings, *self.block_tables):
            row.zero_()
        self.seq_lens.fill_(1)

    def fill(self, inputs: StepInputs, size: int) -> None:
        """The step's rows, and padding up to `size`, in one copy."""
        host = self._mirror.writable()
        rows = (inputs.input_ids, inputs.positions, *inputs.slot_mappings)
        for start, values in zip(self._starts[:-1], rows, strict=True):
            _write(host[start : start + size * 8].view(np.int64), values, padding=0)
        start = self._starts[-1]
        _write(host[start : start + size * 4].view(np.int32), inputs.seq_lens, padding=1)
        shape = (size, inputs.block_tables[0].shape[1])
        num_bytes = shape[0] * shape[1] * 4
        starts = [self._tables_start + index * num_bytes for index in range(len(self.block_tables))]
        for start, table in zip(starts, inputs.block_tables, strict=True):
            _write(host[start : start + num_bytes].view(np.int32).reshape(shape), table, padding=0)
        self._mirror.upload(0, starts[-1] + num_bytes)
        for start, static in zip(starts, self.block_tables, strict=True):
            # What a former step left further right is behind the ends of all sequences, and is not read.
            static[: shape[0], : shape[1]].copy_(self._mirror.on_device(start, torch.int32, shape))


def _write(target: np.ndarray, values: np.ndarray, padding: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batches of up to `max_num_seqs`: few small sizes, then steps of eight, so that padding stays cheap."""
    sizes = {size for size in _SMALL_SIZES if size < max_num_seqs}
    return tuple(sorted(sizes | set(range(_SMALL_SIZES[-1] + _SIZE_STEP, max_num_seqs, _SIZE_STEP)) | {max_num_seqs}))


def decode_graphs_for(
    settings: EngineSettings, loaded: LoadedModel, backend: ModelBackend, kernels: Kernels, group: WorkerGroup | None
) -> DecodeGraphs | None:
    """The graphs of this engine; None where decode steps run eagerly."""
    # A recording is true while a forward pass reads nothing from the host. Sums over workers were never recorded.
    can_record = backend.name == "native" and kernels.name in _RECORDABLE and group is None
    if loaded.device.type != "cuda" or settings.enforce_eager or not can_record:
        return None
    limit = context_limit(loaded.config)
    return DecodeGraphs(
        backend,
        kernels,
        loaded.device,
        CudaRecorder(),
        dtype=loaded.dtype,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=min(settings.max_model_len, limit) if settings.max_model_len > 0 else limit,
        block_size=settings.block_size,
    )
