"""The frontend and the client run where neither torch, transformers nor the engine is installed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc.aio
import pytest

import frontend_process
from fakes import small_tokenizer
from fakes.fake_engine import FakeEngine
from stepwire.v1 import generation_service_pb2, generation_service_pb2_grpc

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import importlib, sys
FORBIDDEN = {"torch", "transformers", "engine_core", "safetensors", "accelerate", "gguf", "huggingface_hub", "psutil"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Refuse())
importlib.import_module(sys.argv[1])
assert not FORBIDDEN & set(sys.modules)
"""


@pytest.mark.parametrize(
    "module",
    ["frontend.__main__", "frontend.server", "frontend.chat_template", "stepwire_client.cli", "stepwire_client"],
)
def test_imports_without_the_engine_extra(module):
    result = subprocess.run([sys.executable, "-c", PROGRAM, module], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_refusal_works():
    result = subprocess.run([sys.executable, "-c", PROGRAM, "torch"], capture_output=True, text=True, timeout=120)
    assert "torch is not installed here" in result.stderr


@pytest.fixture
def frontend_only_python(tmp_path: Path) -> str:
    """The interpreter of a new environment with the wheel of this tree and the frontend's dependencies alone."""
    # With the pip of the tests, and compiled as far as it is used: most of the time went into a pip and into bytecode.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python]
    subprocess.run([*pip, "install", "--no-compile", f"{ROOT}[frontend]"], check=True, cwd=tmp_path)
    probe = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True, cwd=tmp_path)
    assert "No module named 'torch'" in probe.stderr
    return python


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_serves_from_an_environment_of_its_own(frontend_only_python, tmp_path):
    engine = await FakeEngine(small_tokenizer.write_model_dir(tmp_path, small_tokenizer.byte_level_backend())).start()
    async with (
        frontend_process.serving(frontend_only_python, engine.endpoint, tmp_path) as target,
        grpc.aio.insecure_channel(target) as channel,
    ):
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        request = generation_service_pb2.GenerateRequest(text="hello world", stop={"max_tokens": 2})
        response = await stub.Generate(request, timeout=60)
        ask = [frontend_only_python, "-m", "stepwire_client.cli", "generate", "hello world", "--target", target]
        client = await asyncio.create_subprocess_exec(*ask, "--max-tokens", "2", stdout=asyncio.subprocess.PIPE)
        printed, _ = await client.communicate()
    await engine.stop()
    assert response.completions[0].text == "hello world"
    # The client of the same wheel has all of its files.
    assert printed.decode().strip() == "hello world"
