"""How the CPU kernels are compiled, cached and chosen, with compilers that only pretend."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.kernels import build_cpu_kernels, choice
from engine_core.model_executor.kernels.choice import choose_kernels
from engine_core.model_executor.kernels.cpu_build import BuildError, build
from engine_core.model_executor.kernels.cpu_kernels import CpuKernels
from engine_core.model_executor.kernels.cpu_library import available_sets, load_operators
from engine_core.model_executor.kernels.torch_kernels import TorchKernels
from engine_core.model_executor.startup_error import StartupError
from skips import require_program

CPU = torch.device("cpu")
# Writes an output file for -o, and a line for each call that was more than a question for the version.
GOOD_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "pretend 1.0" && exit 0
echo "$@" >>"$(dirname "$0")/calls"
while [ "$1" != -o ]; do shift; done
echo object >"$2"
"""
BROKEN_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "pretend 1.0" && exit 0
echo "some note"
echo "kernels.cpp:1:2: fatal error: immintrin.h: no such file"
exit 3
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Makes the one compiler there is out of a script; without a call there is none."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setattr("shutil.which", lambda name: str(tools / name) if (tools / name).exists() else None)

    def make(script: str) -> Path:
        path = tools / "g++"
        path.write_text(script)
        path.chmod(0o755)
        return tools / "calls"

    return make


def test_a_build_is_made_once_whatever_becomes_of_the_compiler(compiler, tmp_path):
    messages: list[str] = []
    calls = compiler(GOOD_COMPILER)
    library = build(messages.append, cache_dir=tmp_path)
    assert library.is_file()
    num_calls = len(calls.read_text().splitlines())
    assert build(messages.append, cache_dir=tmp_path) == library
    assert len(calls.read_text().splitlines()) == num_calls
    assert len(messages) == 1
    (calls.parent / "g++").unlink()
    assert build(messages.append, cache_dir=tmp_path) == library
    # Nothing is left of the compilation but the libraries.
    assert {path.suffix for path in library.parent.iterdir() if path.name != ".lock"} == {".so"}


def test_the_debug_build_is_another(compiler, tmp_path):
    compiler(GOOD_COMPILER)
    assert build(print, cache_dir=tmp_path, is_debug=True) != build(print, cache_dir=tmp_path)


def test_no_compiler_is_an_error_of_one_sentence(compiler, tmp_path):
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(print, cache_dir=tmp_path)


def test_a_broken_compiler_is_quoted_and_leaves_nothing(compiler, tmp_path):
    compiler(BROKEN_COMPILER)
    with pytest.raises(BuildError, match=r"g\+\+ exits with 3: kernels\.cpp:1:2: fatal error: immintrin\.h"):
        build(print, cache_dir=tmp_path)
    assert [path.name for path in (tmp_path / "cpu_kernels").iterdir()] == [".lock"]


def test_a_cache_that_can_not_be_written_is_an_error_of_one_sentence(compiler, tmp_path):
    compiler(GOOD_COMPILER)
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cpu_kernels: Not a directory"):
        build(print, cache_dir=tmp_path / "file")


def test_the_command_exits_with_1_without_a_compiler(compiler, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["build_cpu_kernels"])
    with pytest.raises(SystemExit) as ended:
        build_cpu_kernels.main()
    assert ended.value.code == 1
    assert "error: there is no C++ compiler" in capsys.readouterr().err


@pytest.fixture
def no_build(monkeypatch):
    def load_operators(*_: object) -> None:
        raise BuildError("there is no C++ compiler")

    monkeypatch.setattr(choice, "load_operators", load_operators)


def test_without_a_build_torch_serves_with_one_warning(no_build, caplog):
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_kernels(EngineSettings(), CPU, torch.float32), TorchKernels)
    (record,) = caplog.records
    assert "no CPU kernels: there is no C++ compiler" in record.getMessage()


def test_without_a_build_an_explicit_choice_is_refused(no_build):
    with pytest.raises(StartupError, match="--cpu-kernels portable: there is no C"):
        choose_kernels(EngineSettings(cpu_kernels="portable"), CPU, torch.float32)


def test_torch_is_chosen_without_a_build(no_build, caplog):
    assert isinstance(choose_kernels(EngineSettings(cpu_kernels="torch"), CPU, torch.float32), TorchKernels)
    assert caplog.records == []


def test_what_the_kernels_do_not_know_is_left_to_torch(no_build, caplog):
    assert isinstance(choose_kernels(EngineSettings(), CPU, torch.float16), TorchKernels)
    (record,) = caplog.records
    assert "float16" in record.getMessage()


@pytest.fixture
def operators():
    require_program("c++", "g++", "clang++", how="apt-get install g++")
    return load_operators(lambda _: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_setting_chooses_the_instruction_set(operators, dtype):
    sets = available_sets(operators)
    assert sets[-1] == "portable"
    for setting, expected in [("auto", sets[0]), *zip(sets, sets, strict=True)]:
        kernels = choose_kernels(EngineSettings(cpu_kernels=setting), CPU, dtype)
        assert isinstance(kernels, CpuKernels)
        assert kernels.name == expected


def test_instructions_that_the_cpu_lacks_are_refused(operators, monkeypatch):
    monkeypatch.setattr(choice, "available_sets", lambda _: ("avx2", "portable"))
    with pytest.raises(
        StartupError, match="--cpu-kernels avx512: this CPU lacks the instructions; it has avx2, portable"
    ):
        choose_kernels(EngineSettings(cpu_kernels="avx512"), CPU, torch.float32)
