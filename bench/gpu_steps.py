"""Model steps against what the device can do: its copy bandwidth for decodes, its matrix rate for prompts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench.gpu_model import BLOCK_SIZE, Shape, SteppedModel, Stopwatch, prompts_of, random_module
from bench.rows import Row

BATCH_SIZES = (1, 8, 64)
PROMPT_TOKENS = 128
DECODE_TARGET, PREFILL_TARGET = 1.2, 0.6
NUM_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured in the same minutes as what is compared with them."""

    # Read and written bytes together.
    copied_bytes_per_s: float
    matrix_flop_per_s: float


def limits_of(device: torch.device, dtype: torch.dtype, *, is_tiny: bool) -> Limits:
    size = 512 if is_tiny else 8192
    source = torch.empty((1 << 22) if is_tiny else (1 << 31), dtype=torch.uint8, device=device)
    target, matrix = torch.empty_like(source), torch.randn(size, size, dtype=dtype, device=device)
    copy_s = _least_seconds(device, lambda: target.copy_(source))
    product_s = _least_seconds(device, lambda: matrix @ matrix)
    return Limits(2 * source.nbytes / copy_s, 2 * size**3 / product_s)


def measure(shape: Shape, limits: Limits, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    model = _model(shape, device, dtype, max(BATCH_SIZES))
    kind = "recorded" if model.runner.graphs is not None else "eager"
    for batch_size in BATCH_SIZES:
        device_s, step_s = _decode_seconds(model, batch_size)
        floor_s = shape.num_read * dtype.itemsize / limits.copied_bytes_per_s
        case = f"{shape.name} B={batch_size} {kind}"
        yield Row("decode step on the device, over weights / copy bandwidth", case, device_s / floor_s, DECODE_TARGET)
        yield Row("decode step on the device, ms", case, device_s * 1e3)
        yield Row("decode step with the host's part, one after the other, ms", case, step_s * 1e3)
    prefill_s = _prefill_seconds(model)
    rate = shape.prefill_flop(shape.prompts) / prefill_s / limits.matrix_flop_per_s
    case = f"{shape.name} {len(shape.prompts)}x{shape.prompts[0]}"
    yield Row("prefill FLOP/s over the matrix rate", case, rate, PREFILL_TARGET, "higher")


def compare_flashinfer(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """Whole steps, both without graphs. Nothing where FlashInfer is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return
    batch_size, seconds = max(BATCH_SIZES), []
    for attention_backend in ("triton", "flashinfer"):
        flags = {"attention_backend": attention_backend, "enforce_eager": True}
        model = _model(shape, device, dtype, batch_size, **flags)
        seconds.append((_decode_seconds(model, batch_size)[1], _prefill_seconds(model)))
        del model
    for kind, triton_s, flashinfer_s in zip(("decode", "prefill"), *seconds, strict=True):
        yield Row(f"{kind} step with Triton over FlashInfer, eager", shape.name, triton_s / flashinfer_s)


def _model(
    shape: Shape, device: torch.device, dtype: torch.dtype, max_num_seqs: int, **settings: object
) -> SteppedModel:
    # Decodes of the largest batch, or the prompts.
    num_tokens = max(max_num_seqs * (PROMPT_TOKENS + 4 * shape.num_steps), sum(shape.prompts) + len(shape.prompts))
    num_blocks = num_tokens // BLOCK_SIZE + 2 * max_num_seqs
    return SteppedModel(shape, random_module(shape, dtype, device), max_num_seqs, num_blocks, **settings)


def _decode_seconds(model: SteppedModel, batch_size: int) -> tuple[float, float]:
    """Of a step: on the device alone, and with the host's part; the least of the rounds."""
    num_steps = model.shape.num_steps
    model.begin(prompts_of([PROMPT_TOKENS] * batch_size, model.shape.vocab_size), num_outputs=3 * num_steps)
    for _ in range(num_steps // 2):
        model.decode()
    rounds = []
    with Stopwatch(model.device) as step_watch:
        for _ in range(num_steps):
            model.decode()
    # Where nothing is recorded a repetition is a step, for which there is room once.
    for _ in range(NUM_ROUNDS if model.runner.graphs is not None else 1):
        with Stopwatch(model.device) as watch:
            for _ in range(num_steps):
                model.repeat()
        rounds.append(watch.seconds)
    return min(rounds) / num_steps, step_watch.seconds / num_steps


def _prefill_seconds(model: SteppedModel) -> float:
    prompts = prompts_of(model.shape.prompts, model.shape.vocab_size)
    model.begin(prompts, num_outputs=1)
    return _least_seconds(model.device, lambda: model.begin(prompts, num_outputs=1))


def _least_seconds(device: torch.device, work: Callable[[], object], num_rounds: int = 5) -> float:
    rounds = []
    for _ in range(num_rounds):
        with Stopwatch(device) as watch:
            work()
        rounds.append(watch.seconds)
    return min(rounds)
