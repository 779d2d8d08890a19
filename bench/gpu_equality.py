"""That the device computes what it should: the CPU's tokens in float32, and the same logits whatever the batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from bench.gpu_model import Shape, SteppedModel, prompts_of, random_module
from bench.rows import Row

# Large enough that a wrong head, block or layer changes a token, small enough for the CPU.
SMALL = Shape("small", 256, 512, 4, 8, 2, 64, 4096, is_tied=True)
PROMPTS = (5, 40, 130, 17)
NUM_OUTPUTS = 32
NUM_BLOCKS = 100


def measure(device: torch.device) -> Iterator[Row]:
    """The CPU's reference is plain torch; the device has its kernels, and its recorded steps."""
    module = random_module(SMALL, torch.float32, torch.device("cpu"))
    on_device = copy.deepcopy(module).to(device)
    reference = SteppedModel(SMALL, module, len(PROMPTS), NUM_BLOCKS, cpu_kernels="torch")
    found = SteppedModel(SMALL, on_device, len(PROMPTS), NUM_BLOCKS)
    prompts = prompts_of(PROMPTS, SMALL.vocab_size)
    pairs = list(zip(_tokens(reference, prompts), _tokens(found, prompts), strict=True))
    share = sum(mine == theirs for mine, theirs in pairs) / len(pairs)
    yield Row("tokens equal to the CPU's in float32, share", f"{len(pairs)} tokens", share, 1.0, "higher")
    if device.type == "cuda":
        yield _invariance(device)


def _invariance(device: torch.device) -> Row:
    """With --batch-invariant: tokens of a request alone, and among others."""
    module = random_module(SMALL, torch.bfloat16, device)
    model = SteppedModel(SMALL, module, len(PROMPTS), NUM_BLOCKS, batch_invariant=True)
    prompts = prompts_of(PROMPTS, SMALL.vocab_size)
    together = _tokens(model, prompts)[:: len(PROMPTS)]
    alone = _tokens(model, prompts[:1])
    return Row("--batch-invariant: the same tokens alone and among others", "small", together == alone, 1.0, "higher")


def _tokens(model: SteppedModel, prompts: list[list[int]]) -> list[int]:
    """Step by step, all sequences of a step side by side."""
    found = model.begin(prompts, NUM_OUTPUTS)
    for _ in range(NUM_OUTPUTS - 1):
        found += model.decode()
    return found
