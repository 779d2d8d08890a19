"""The safetensors files of a local model directory: what is in them, and a version that names their content.

Reads headers and bytes, without torch: also for who only checks or hands on. Any thread.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import operator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine_core.model_executor.executor import WEIGHT_DTYPES

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Longer headers are no checkpoint's: the library's own limit.
_MAX_HEADER_BYTES = 100_000_000
_HASH_THREADS = 8
_VERSION_DIGITS = 16


class CheckpointError(Exception):
    """The files can not be read, or are none."""


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Where a tensor lies."""

    file: Path
    # As torch writes it where we know it, else as the file does.
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def checkpoint_files(directory: Path) -> list[Path]:
    """The files that transformers loads: the only one, or those of the index. Raises CheckpointError."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.is_file() or not index.is_file():
        return [single]
    try:
        return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{_INDEX} can not be used ({error})") from error


def read_headers(files: list[Path]) -> dict[str, CheckpointTensor]:
    """All tensors by name. Reads no weights. Raises CheckpointError."""
    tensors: dict[str, CheckpointTensor] = {}
    for file in files:
        try:
            tensors.update(_read_header(file))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{file.name} can not be used ({error})") from error
    return tensors


def num_parameters(tensors: dict[str, CheckpointTensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


def read_tensor(tensor: CheckpointTensor) -> bytearray:
    """Its bytes. Raises CheckpointError."""
    data = bytearray(tensor.num_bytes)
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            num_read = file.readinto(data)
    except OSError as error:
        raise CheckpointError(f"{tensor.file.name} can not be read ({error})") from error
    if num_read != len(data):
        raise CheckpointError(f"{tensor.file.name} ends too early")
    return data


def content_version(directory: Path) -> str:
    """Equal for equal names, types, shapes and values, however they are spread over files. Raises CheckpointError.

    Engines on different hosts must agree on it, so neither paths nor times take part.
    """
    tensors = sorted(read_headers(checkpoint_files(directory)).items())
    with ThreadPoolExecutor(_HASH_THREADS, "checkpoint-hash") as threads:
        digests = threads.map(_digest, [tensor for _, tensor in tensors])
        lines = [
            f"{name} {tensor.dtype} {tensor.shape} {digest}\n"
            for (name, tensor), digest in zip(tensors, digests, strict=True)
        ]
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()[:_VERSION_DIGITS]}"


def _digest(tensor: CheckpointTensor) -> str:
    if tensor.num_bytes == 0:
        return ""
    try:
        # Mapped, not read: the page cache is shared with the loader, and hashing needs no memory of its own.
        with (
            tensor.file.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
            view[tensor.start : tensor.start + tensor.num_bytes] as data,
        ):
            return hashlib.sha256(data).hexdigest()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.file.name} can not be read ({error})") from error


def _read_header(path: Path) -> dict[str, CheckpointTensor]:
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < num_bytes <= _MAX_HEADER_BYTES:
            raise ValueError("it is no safetensors file")
        header = json.loads(file.read(num_bytes))
    header.pop("__metadata__", None)
    size = path.stat().st_size
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + num_bytes + offset for offset in entry["data_offsets"])
        if not 8 + num_bytes <= start <= end <= size:
            raise ValueError(f"{name} lies outside of the file")
        dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
        # 4.0 equals 4 and is no size.
        shape = tuple(map(operator.index, entry["shape"]))
        _require_size(name, dtype, shape, end - start)
        tensors[name] = CheckpointTensor(path, dtype, shape, start, end - start)
    return tensors


def _require_size(name: str, dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
    # How large a value of another type is, only its reader knows.
    expected = math.prod(shape) * WEIGHT_DTYPES[dtype] if dtype in WEIGHT_DTYPES else num_bytes
    if num_bytes != expected:
        raise ValueError(f"{name} has {num_bytes} bytes, not {expected}")
