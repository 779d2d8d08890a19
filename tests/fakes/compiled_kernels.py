"""Compiles every Triton kernel to machine code of an H100 and fails if the compiler refuses one. Needs no GPU.

A script, run without Triton's interpreter. Types and constants are those that the launchers choose for bfloat16.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine_core.model_executor.kernels import (
    triton_decode,
    triton_elementwise,
    triton_linear,
    triton_prefill,
    triton_rope_cache,
)

_TARGET = GPUTarget("cuda", 90, 32)
# Multiples of 16, as a model's sizes are: what the runtime would see, and what lets loads be wide.
_DIVISIBLE = {"query_stride", "out_stride", "block_stride", "head_stride", "row_stride", "num_features", "depth"}
_TILE = {"GROUP": 4, "D": 64, "D_TILE": 64, "BLOCK_SIZE": 16, "HAS_WINDOW": True, "HAS_SOFTCAP": True, "KEYS": 64}


def compile_kernel(kernel: Any, types: str, constants: dict[str, Any], **options: int) -> str:
    """The kernel's PTX. types: of the arguments that are no constants, in their order; b = *bf16, f = *fp32."""
    short = {"b": "*bf16", "f": "*fp32", "i": "*i32", "l": "*i64", "n": "i32", "x": "fp32"}
    given = iter(types)
    signature = {name: "constexpr" if name in constants else short[next(given)] for name in kernel.arg_names}
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in _DIVISIBLE
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=divisible)
    return str(triton.compile(source, target=_TARGET, options=options).asm["ptx"])


def require(ptx: str, instruction: str) -> None:
    if instruction not in ptx:
        raise SystemExit(f"{instruction} is missing")


def main() -> None:
    decode = {**_TILE, "ROWS": 16, "LEAST": 256}
    for has_parts in (True, False):
        ptx = compile_kernel(
            triton_decode._decode, "bbbiiibfnnnnnnxxn", {**decode, "HAS_PARTS": has_parts}, num_warps=4, num_stages=3
        )
        # Keys come in while others are multiplied, by tensor cores.
        require(ptx, "cp.async")
        require(ptx, "mma.sync")
    compile_kernel(triton_decode._join, "fbinnn", {"GROUP": 4, "D": 64, "D_TILE": 64}, num_warps=1)
    for has_decodes in (True, False):
        constants = {**_TILE, "ROWS": 128, "HAS_DECODES": has_decodes}
        ptx = compile_kernel(triton_prefill._prefill, "bbbiiibnnnnnnxxn", constants, num_warps=4, num_stages=2)
        require(ptx, "cp.async")
        require(ptx, "wgmma")
    rope = {"NUM_HEADS": 8, "NUM_KV_HEADS": 2, "D": 64, "HALF": 16, "HALF_TILE": 16, "REST_TILE": 32, "BLOCK_SIZE": 16}
    compile_kernel(triton_rope_cache._rope_and_cache, "bffbblffxnnn", {**rope, "HAS_NORM": True}, num_warps=1)
    compile_kernel(triton_elementwise._add_rms_norm, "bbfbnx", {"HAS_X": True, "COLUMNS": 4096}, num_warps=8)
    for activation in ("silu", "gelu", "gelu_tanh"):
        compile_kernel(triton_elementwise._act_mul, "bbn", {"ACTIVATION": activation, "COLUMNS": 1024}, num_warps=4)
    tile = {"HAS_BIAS": True, "ROWS": 64, "COLUMNS": 128, "DEPTH": 64}
    require(compile_kernel(triton_linear._linear, "bbbbnnn", tile, num_warps=4, num_stages=3), "wgmma")


if __name__ == "__main__":
    main()
