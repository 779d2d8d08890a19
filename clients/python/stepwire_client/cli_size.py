"""`stepwire size`: weights, KV cache and concurrency of a model from its config.json; asks no server and no network."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stepwire_client import cli_printing
from stepwire_client.cli_session import FAILED
from stepwire_client.sizing.model_shape import SizingError, read_shape
from stepwire_client.sizing.size import GIB, Settings, Size, size


class Dtype(StrEnum):
    """As the engine's --dtype."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


ModelPath = Annotated[Path, typer.Option("--model", help="A config.json, or the directory of a model.", exists=True)]
Gpu = Annotated[float, typer.Option(min=0, help="Memory of one GPU in GiB; 0 = a CPU.")]
Kv = Annotated[float, typer.Option("--kv-cache-memory", min=0, help="KV cache on a CPU in GiB.")]
Overhead = Annotated[
    float,
    typer.Option("--overhead", min=-1, help="GiB of one GPU for the largest step and graphs; -1 = estimate."),
]
Context = Annotated[int, typer.Option(min=0, help="Tokens of a request, prompt and answer; 0 = the longest allowed.")]
Utilization = Annotated[float, typer.Option("--gpu-memory-utilization", min=0.01, max=1, help="As the engine's.")]
TensorParallel = Annotated[int, typer.Option("--tensor-parallel-size", min=1, help="As the engine's.")]
DtypeOption = Annotated[Dtype, typer.Option(help="As the engine's; auto = float32 on a CPU.")]
MaxModelLen = Annotated[int, typer.Option("--max-model-len", min=-1, help="As the engine's; -1 = as long as fits.")]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", min=1, help="As the engine's.")]
MaxTokens = Annotated[int, typer.Option("--max-num-batched-tokens", min=1, help="As the engine's.")]
BlockSize = Annotated[int, typer.Option("--block-size", min=1, help="As the engine's.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def size_command(
    model: ModelPath,
    gpu: Gpu = 0.0,
    kv_cache_memory: Kv = 0.0,
    overhead: Overhead = -1.0,
    context: Context = 0,
    gpu_memory_utilization: Utilization = 0.9,
    tensor_parallel_size: TensorParallel = 1,
    dtype: DtypeOption = Dtype.AUTO,
    max_model_len: MaxModelLen = 0,
    max_num_seqs: MaxNumSeqs = 128,
    max_num_batched_tokens: MaxTokens = 2048,
    block_size: BlockSize = 16,
    as_json: Json = False,
) -> None:
    """Say what a model takes and how many requests fit beside it."""
    if bool(gpu) == bool(kv_cache_memory):
        raise typer.BadParameter("give one of --gpu and --kv-cache-memory")
    settings = Settings(
        gpu_bytes=int(gpu * GIB),
        gpu_memory_utilization=gpu_memory_utilization,
        overhead_bytes=None if overhead < 0 else int(overhead * GIB),
        kv_cache_bytes=int(kv_cache_memory * GIB),
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
    )
    try:
        result = size(read_shape(model), settings, context)
    except SizingError as error:
        cli_printing.note(f"error: {error}", style="bold red")
        raise typer.Exit(FAILED) from error
    if as_json:
        cli_printing.write_text(json.dumps(dataclasses.asdict(result)) + "\n")
    else:
        _show(result, settings)


def _show(result: Size, settings: Settings) -> None:
    table = Table(show_header=False, box=None)
    for name, value, remark in _rows(result, settings):
        table.add_row(name, value, remark.strip())
    Console(highlight=False).print(table)


def _rows(result: Size, settings: Settings) -> Iterator[tuple[str, str, str]]:
    where = "on each worker" if settings.tensor_parallel_size > 1 else ""
    yield "weights", _gib(result.weight_bytes), f"{result.num_parameters:,} parameters, {result.dtype} {where}"
    if settings.gpu_bytes:
        yield "largest step", _gib(result.overhead_bytes), "estimate" if settings.overhead_bytes is None else ""
    yield "KV cache", _gib(result.kv_bytes), f"{result.num_blocks:,} blocks of {settings.block_size} tokens {where}"
    yield "KV per token", f"{result.kv_bytes_per_token / 1024:,.1f} KiB", where
    yield "KV tokens", f"{result.kv_tokens:,}", "in requests of full length"
    yield "context", f"{result.max_model_len:,}", "the longest request, prompt and answer"
    yield "at once", f"{result.concurrency:,}", _limit(result, settings)


def _limit(result: Size, settings: Settings) -> str:
    held = f"requests of {result.context:,} tokens; {result.fitting_requests:,} fit the KV cache"
    return held + (f", --max-num-seqs {settings.max_num_seqs} is the limit" if _is_capped(result) else "")


def _is_capped(result: Size) -> bool:
    return result.concurrency < result.fitting_requests


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
