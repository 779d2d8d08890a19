"""The whole service on a GPU beside `offline`, and how long the device waits for the host of a loaded engine.

Needs files, because the services load them: random weights and a tokenizer of as many words, under build/bench.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
import torch

from bench import engine_flags, running_service, whole_service
from bench.gpu_model import Shape, random_module
from bench.rows import Row
from offline import LLM, SamplingParams
from stepwire_client.load.workload import synthetic

CONCURRENCY = 64
SERVICE_TARGET, WAIT_TARGET = 0.95, 0.03
FEW, MANY = 32, 160
NUM_ROUNDS = 3


def save(shape: Shape, directory: Path, dtype: torch.dtype, device: torch.device) -> Path:
    """The weights are new each time: a file of an earlier run may be of another shape."""
    directory.mkdir(parents=True, exist_ok=True)
    words = tokenizers.models.WordLevel({f"w{index}": index for index in range(shape.vocab_size)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(directory / "tokenizer.json"))
    module: Any = random_module(shape, dtype, device)
    module.save_pretrained(directory)
    return directory


def measure(shape: Shape, device: torch.device, dtype: torch.dtype, device_step_s: float | None) -> Iterator[Row]:
    """`device_step_s`: of a decode step of as many requests, on the device alone."""
    directory = save(shape, engine_flags.BUILD / f"gpu-{shape.name}", dtype, device)
    changes: dict[str, object] = {
        "model": str(directory),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "max_num_seqs": CONCURRENCY,
        # Two engines share the device.
        "num_blocks": CONCURRENCY * 20,
        "gpu_memory_utilization": 0.4,
    }
    settings = {**engine_flags.SETTINGS, **changes, "async_scheduling": True}
    with running_service.running(*engine_flags.flags(**changes)) as service, LLM(**settings) as llm:  # type: ignore[arg-type]  # settings by name
        yield from whole_service.compare(service, llm, (CONCURRENCY,), SERVICE_TARGET, f"{shape.name}: ")
        step_s = _decode_step_seconds(llm)
    case = f"{shape.name} c={CONCURRENCY}, asynchronous scheduling"
    yield Row("decode step of a loaded engine, ms", case, step_s * 1e3)
    if device_step_s is not None:
        # Sampling counts as waiting, and so is the figure too high rather than too low.
        yield Row("share of a step in which the device waits", case, 1 - device_step_s / step_s, WAIT_TARGET)


def _decode_step_seconds(llm: LLM) -> float:
    """From batches that differ in the number of output tokens alone; the least of the rounds."""
    requests = synthetic(whole_service.INPUT, whole_service.OUTPUT, 0, whole_service.VOCAB_SIZE, "gpu steps")
    rounds = []
    for _ in range(NUM_ROUNDS):
        prompts = [list(request.prompt_token_ids) for request in islice(requests, CONCURRENCY)]
        seconds = []
        for num_tokens in (FEW, MANY):
            sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            started = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
        rounds.append((seconds[1] - seconds[0]) / (MANY - FEW))
    return min(rounds)
