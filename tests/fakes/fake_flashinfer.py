"""Stands in for the flashinfer package: its two wrappers, which record what they are told and compute it plainly.

Signatures and meanings are those of flashinfer 0.6 (`decode.py`, `prefill.py`); nothing of FlashInfer itself runs.
"""

from __future__ import annotations

import importlib.machinery
import types
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Calls:
    plans: list[dict[str, Any]] = field(default_factory=list)
    num_runs: int = 0


def fake_flashinfer() -> tuple[types.ModuleType, Calls]:
    """The module, to be put under its name, and what it was asked."""
    calls = Calls()

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(
            self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool = False
        ) -> None:
            assert float_workspace_buffer.dtype == torch.uint8
            assert kv_layout == "HND"
            self.use_tensor_cores = use_tensor_cores

        def plan(
            self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
            window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None,
        ) -> None:  # fmt: skip
            qo_indptr = torch.arange(len(indptr), dtype=torch.int32)
            self._planned = locals() | {"kind": "decode", "causal": True}
            _check(self._planned, calls)

        def run(self, q: torch.Tensor, paged_kv_cache, *, out: torch.Tensor) -> torch.Tensor:
            return _run(self._planned, calls, q, paged_kv_cache, out)

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
            assert float_workspace_buffer.dtype == torch.uint8
            assert kv_layout == "HND"

        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, *, causal=False, window_left=-1, logits_soft_cap=None, q_data_type="float16",
            kv_data_type=None, sm_scale=None,
        ) -> None:  # fmt: skip
            indptr, indices, last_page_len = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            head_dim = head_dim_qk
            self._planned = locals() | {"kind": "prefill"}
            _check(self._planned, calls)

        def run(self, q: torch.Tensor, paged_kv_cache, *, out: torch.Tensor) -> torch.Tensor:
            return _run(self._planned, calls, q, paged_kv_cache, out)

    module = types.ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    return module, calls


def _check(planned: dict[str, Any], calls: Calls) -> None:
    names = ("qo_indptr", "indptr", "indices", "last_page_len")
    assert all(planned[name].dtype == torch.int32 and planned[name].device.type == "cpu" for name in names)
    assert len(planned["indices"]) == planned["indptr"][-1]
    assert bool(((planned["last_page_len"] >= 1) & (planned["last_page_len"] <= planned["page_size"])).all())
    assert planned["causal"]
    calls.plans.append(planned)


def _run(planned: dict[str, Any], calls: Calls, q: torch.Tensor, cache, out: torch.Tensor) -> torch.Tensor:
    calls.num_runs += 1
    assert q.is_contiguous()
    assert q.dtype == planned["q_data_type"]
    assert q.shape[1:] == (planned["num_qo_heads"], planned["head_dim"])
    assert cache[0].shape[1:] == (planned["num_kv_heads"], planned["page_size"], planned["head_dim"])
    starts, pages = planned["qo_indptr"].tolist(), planned["indptr"].tolist()
    for index, last in enumerate(planned["last_page_len"].tolist()):
        blocks = planned["indices"][pages[index] : pages[index + 1]].long()
        kv_len = (len(blocks) - 1) * planned["page_size"] + last
        rows = slice(starts[index], starts[index + 1])
        # [K, kv_len, D]
        own_keys, own_values = (part[blocks].transpose(0, 1).flatten(1, 2)[:, :kv_len].float() for part in cache)
        out[rows] = _attend(planned, q[rows].float(), own_keys, own_values).to(out.dtype)
    return out


def _attend(planned: dict[str, Any], q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    group = planned["num_qo_heads"] // planned["num_kv_heads"]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("qhd,hkd->hqk", q, keys) * planned["sm_scale"]
    if planned["logits_soft_cap"]:
        scores = planned["logits_soft_cap"] * torch.tanh(scores / planned["logits_soft_cap"])
    # As the kernels: aligned at the end, and window_left keys to the left of the query's own.
    positions = torch.arange(len(q))[:, None] + keys.shape[1] - len(q)
    at = torch.arange(keys.shape[1])[None]
    is_visible = at <= positions
    if planned["window_left"] >= 0:
        is_visible &= at >= positions - planned["window_left"]
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(~is_visible, -torch.inf).softmax(-1), values)
