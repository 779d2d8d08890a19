"""What the GPU path reaches, in under six minutes and without any download: `python -m bench.gpu`.

Random weights of real shapes. Without a GPU nothing is measured and nothing is claimed; `--device cpu --tiny` runs the
same code on a CPU, whose figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from bench import engine_flags, gpu_equality, gpu_service, gpu_steps, rows
from bench.gpu_model import LLAMA_1B, LLAMA_8B, TINY, Shape
from bench.rows import Row

RESULTS = engine_flags.ROOT / "bench" / "results" / "gpu.json"
# A part that would begin later is left out, and named.
LAST_BEGIN_S = 240.0
NOTHING = "No GPU here: nothing was measured and nothing is claimed.\n"

Part = tuple[str, Callable[[], Iterable[Row]]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmarks of the GPU path.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one tiny model: is everything there?")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the rows go as JSON")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write(NOTHING)
        return 0
    device = torch.device(arguments.device)
    found, left_out, failures = run(parts(device, is_tiny=arguments.tiny), time.monotonic)
    if device.type == "cpu":
        # The targets are a GPU's.
        found = [replace(row, target=None) for row in found]
    rows.show(found)
    for name, reason in {**dict.fromkeys(left_out, "left out: no time"), **failures}.items():
        sys.stdout.write(f"{name}: {reason}\n")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": machine(device),
        "rows": [row.as_dict() for row in found],
        "left_out": left_out,
        "failures": failures,
    }
    arguments.output.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failures else 0


def run(all_parts: Iterable[Part], clock: Callable[[], float]) -> tuple[list[Row], list[str], dict[str, str]]:
    """The rows of all parts, those that were left out for want of time, and those that failed, with the reason."""
    started = clock()
    found: list[Row] = []
    left_out: list[str] = []
    failures: dict[str, str] = {}
    for name, measure in all_parts:
        if clock() - started > LAST_BEGIN_S:
            left_out.append(name)
            continue
        try:
            for row in measure():
                found.append(row)
                sys.stderr.write(f"{clock() - started:6.1f} s  {row.name}, {row.case}: {row.value:.4g}\n")
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
        # The next part has the memory for itself.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found, left_out, failures


def parts(device: torch.device, *, is_tiny: bool) -> Iterator[Part]:
    """What matters most comes first."""
    dtype = torch.bfloat16
    first, others = (TINY, ()) if is_tiny else (LLAMA_1B, (LLAMA_8B,))
    limits = gpu_steps.limits_of(device, dtype, is_tiny=is_tiny)
    steps = _Steps(limits, device, dtype)
    yield "limits", lambda: _limit_rows(limits)
    yield "equality", lambda: gpu_equality.measure(device)
    yield first.name, lambda: steps.measure(first)
    yield "service", lambda: gpu_service.measure(first, device, dtype, steps.device_step_s)
    for shape in others:
        yield shape.name, lambda shape=shape: steps.measure(shape)  # type: ignore[misc]  # mypy knows no defaults here
    if device.type == "cuda":
        yield "FlashInfer", lambda: gpu_steps.compare_flashinfer(first, device, dtype)


class _Steps:
    """Remembers what the service is compared with."""

    def __init__(self, limits: gpu_steps.Limits, device: torch.device, dtype: torch.dtype) -> None:
        self._arguments = limits, device, dtype
        # Of the first shape, on the device alone, at the service's concurrency.
        self.device_step_s: float | None = None

    def measure(self, shape: Shape) -> Iterator[Row]:
        for row in gpu_steps.measure(shape, *self._arguments):
            is_service_batch = f" B={gpu_service.CONCURRENCY} recorded" in row.case
            if self.device_step_s is None and is_service_batch and row.name.endswith("on the device, ms"):
                self.device_step_s = row.value / 1e3
            yield row


def _limit_rows(limits: gpu_steps.Limits) -> Iterator[Row]:
    yield Row("copy bandwidth, read and written, GB/s", "", limits.copied_bytes_per_s / 1e9, better="higher")
    yield Row("matrix rate, bfloat16, TFLOP/s", "", limits.matrix_flop_per_s / 1e12, better="higher")


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU: says nothing about a GPU"
    return {"device": name, "torch": torch.__version__, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


if __name__ == "__main__":
    sys.exit(main())
