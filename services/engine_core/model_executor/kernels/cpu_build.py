"""Compiles csrc/ into one library of CPU kernels, once for each state of sources, compiler, flags and torch.

Used by the install command and by the thread that starts the engine. Knows nothing of torch's operators.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock

from stepwire.settings import user_cache_dir

SOURCES = Path(__file__).parents[1] / "csrc"
# Best first; a set's place here is its number in csrc/instruction_sets.h.
INSTRUCTION_SETS = ("amx", "avx512", "avx2", "portable")

_BASE_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-w")
# One compilation each; amx comes with avx512, of which it only multiplies matrices in another way.
_SET_FLAGS = {
    "avx512": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx2": ("-march=x86-64-v3",),
    "portable": (),
}


class BuildError(Exception):
    """The kernels can not be compiled here; the message says why, in one sentence."""


def build(progress: Callable[[str], None], *, is_debug: bool = False, cache_dir: Path | None = None) -> Path:
    """The library, compiled unless one of the same sources, flags and torch is in the cache."""
    name = "stepwire_debug" if is_debug else "stepwire"
    directory = (cache_dir or user_cache_dir()) / "cpu_kernels"
    library = directory / f"{name}-{_fingerprint(is_debug)}.so"
    try:
        if not library.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            with FileLock(directory / ".lock"):
                # The holder of the lock before us may have made it.
                if not library.is_file():
                    compiler = _find_compiler()
                    progress("compiling the CPU kernels (once; about half a minute)")
                    _compile(compiler, library, is_debug)
    except OSError as error:
        raise BuildError(f"{directory}: {error.strerror or error}") from error
    return library


def _find_compiler() -> str:
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError("there is no C++ compiler (c++, g++ or clang++)")


def _fingerprint(is_debug: bool) -> str:
    """Not of the compiler: a library that was made where there is one serves where there is none."""
    digest = hashlib.sha256()
    for part in (torch.__version__, platform.machine(), repr(_units(is_debug))):
        digest.update(part.encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _commands(compiler: str, build_dir: Path, is_debug: bool) -> list[list[str]]:
    """One for each object file."""
    torch_include = Path(torch.__file__).parent / "include"
    return [
        [compiler, *flags, f"-I{torch_include}", "-c", str(SOURCES / source), "-o", str(build_dir / f"{unit}.o")]
        for unit, source, flags in _units(is_debug)
    ]


def _units(is_debug: bool) -> list[tuple[str, str, tuple[str, ...]]]:
    """Name, source and flags of each object file."""
    namespace = "stepwire_debug" if is_debug else "stepwire"
    torch_flags = (
        "-fopenmp",
        f"-DSTEPWIRE_NAMESPACE={namespace}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(("-DSTEPWIRE_DEBUG",) if is_debug else ()),
    )
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return [
        *((source, f"{source}.cpp", (*_BASE_FLAGS, *torch_flags)) for source in ("ops", "layers")),
        *(
            (name, "kernels.cpp", (*_BASE_FLAGS, *_SET_FLAGS[name], f"-DSTEPWIRE_TABLE={name}_kernels"))
            for name in _SET_FLAGS
            if name == "portable" or is_x86
        ),
    ]


def _compile(compiler: str, library: Path, is_debug: bool) -> None:
    torch_lib = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        build_dir = Path(temporary)
        _run_all(_commands(compiler, build_dir, is_debug))
        objects = [str(path) for path in sorted(build_dir.glob("*.o"))]
        linked = build_dir / library.name
        link = [compiler, "-shared", *objects, "-o", str(linked), f"-L{torch_lib}", "-ltorch_cpu", "-lc10", "-fopenmp"]
        _run_all([link])
        linked.rename(library)


def _run_all(commands: list[list[str]]) -> None:
    """All at once; the first that fails is what the error names."""
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    # All are waited for: none may go on writing into a directory that is removed.
    outputs = [process.communicate()[0] for process in processes]
    for command, process, output in zip(commands, processes, outputs, strict=True):
        if process.returncode != 0:
            lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
            reason = lines[0].strip() if lines else "it said nothing"
            raise BuildError(f"{command[0]} exits with {process.returncode}: {reason}")
