"""How much memory this process may still take, what it can give back, and sizes written like 2GiB."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import psutil

GIB = 1 << 30
_UNITS = {"": 1, "b": 1}
_UNITS.update({f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)})
_UNITS.update({f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)})
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_CGROUP = Path("/sys/fs/cgroup")


def parse_size(text: str) -> int:
    """Bytes of a size like 2GiB, 512MiB, 1.5GB or 4096. Raises ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size like 2GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Free memory of the machine, or what the container's limit leaves if that is less."""
    available = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        # No container, cgroup v1, or "max": the machine is the limit.
        return available
    return max(0, min(available, limit - used))


def return_freed_memory() -> None:
    """Give freed memory back to the system, as far as the C library can: behind loading, it has kept much of it."""
    if sys.platform == "linux":
        # glibc's own; musl keeps less and has none.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def format_gib(num_bytes: float) -> str:
    """Two digits after the point: `1.25 GiB`."""
    return f"{num_bytes / GIB:.2f} GiB"
