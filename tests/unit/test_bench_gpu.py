"""The benchmark of the GPU path by its CPU twin: a tiny model, the same code but for recorded steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu, gpu_equality, gpu_steps
from bench.gpu_model import LLAMA_1B, LLAMA_8B, TINY
from bench.rows import Row

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_claims_nothing(tmp_path: Path):
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "bench.gpu", "--output", str(output)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent.parent
    )
    assert result.stdout == gpu.NOTHING
    assert not output.exists()


def test_equality_and_steps_on_a_cpu():
    [equality] = gpu_equality.measure(CPU)
    assert equality.met
    limits = gpu_steps.limits_of(CPU, torch.bfloat16, is_tiny=True)
    found = list(gpu_steps.measure(TINY, limits, CPU, torch.bfloat16))
    assert len(found) == 3 * len(gpu_steps.BATCH_SIZES) + 1
    assert all(row.value > 0 for row in found)
    assert {row.target for row in found} == {gpu_steps.DECODE_TARGET, gpu_steps.PREFILL_TARGET, None}


@pytest.mark.parametrize(("shape", "num_parameters"), [(LLAMA_1B, 1.236e9), (LLAMA_8B, 8.03e9)])
def test_shapes_are_those_of_the_models(shape, num_parameters):
    embedding = 0 if shape.is_tied else shape.vocab_size * shape.hidden_size
    assert shape.num_read + embedding == pytest.approx(num_parameters, rel=0.002)


def test_a_part_that_fails_is_named_and_the_others_are_measured():
    def fails():
        yield Row("before", "", 1.0)
        raise RuntimeError("no memory")

    found, left_out, failures = gpu.run([("one", fails), ("two", lambda: [Row("after", "", 2.0)])], lambda: 0.0)
    assert [row.name for row in found] == ["before", "after"]
    assert (left_out, failures) == ([], {"one": "RuntimeError: no memory"})


def test_a_part_that_would_begin_too_late_is_left_out():
    times = iter([0.0, 1.0, 2.0, gpu.LAST_BEGIN_S + 1])
    found, left_out, _ = gpu.run([("one", lambda: [Row("a", "", 1.0)]), ("two", list)], lambda: next(times))
    assert ([row.name for row in found], left_out) == (["a"], ["two"])


@pytest.mark.slow
def test_the_whole_twin(tmp_path: Path):
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--tiny", "--output", str(output)]
    subprocess.run(command, check=True, cwd=Path(__file__).parent.parent.parent)
    content = json.loads(output.read_text())
    assert (content["failures"], content["left_out"]) == ({}, [])
    names = {row["name"] for row in content["rows"]}
    assert "tiny: whole service over offline, tok/s" in names
    assert "prefill FLOP/s over the matrix rate" in names
    # Of a device that waits nothing can be said where nothing is recorded.
    assert "share of a step in which the device waits" not in names
