"""What else the machine did meanwhile: CPU time of processes that are not ours, and time the hypervisor took away.

Two looks at the counters of the kernel, none in between: measuring costs nothing while something is measured. Linux.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Self

import psutil

# Fixed before anything is measured: a figure from a noisier time is not compared with others.
CLEAN_FOREIGN_PERCENT, CLEAN_STEAL_PERCENT = 2.0, 1.0


@dataclass(frozen=True, slots=True)
class Noise:
    """Percent of one core, on average over the time measured."""

    foreign_percent: float
    steal_percent: float

    @property
    def is_clean(self) -> bool:
        return self.foreign_percent <= CLEAN_FOREIGN_PERCENT and self.steal_percent <= CLEAN_STEAL_PERCENT

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "is_clean": self.is_clean}


@dataclass(frozen=True, slots=True)
class Look:
    """The counters at one moment, in seconds."""

    at: float
    busy: float
    own: float
    steal: float

    @classmethod
    def now(cls) -> Self:
        times = psutil.cpu_times()
        busy = times.user + times.nice + times.system + times.irq + times.softirq
        return cls(time.monotonic(), busy, _own_seconds(), times.steal)

    def until(self, later: Look) -> Noise:
        """What happened between the two. Kernel threads count as foreign."""
        seconds = max(later.at - self.at, 1e-9)
        foreign = (later.busy - self.busy) - (later.own - self.own)
        steal = later.steal - self.steal
        return Noise(round(max(0.0, foreign) * 100 / seconds, 2), round(max(0.0, steal) * 100 / seconds, 2))


def _own_seconds() -> float:
    """CPU time of this process and all it has started, also of what has ended: whoever waits for it inherits it."""
    process = psutil.Process(os.getpid())
    total = 0.0
    for member in [process, *process.children(recursive=True)]:
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:
            # It ended since it was listed; its parent has its time.
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def machine() -> dict[str, object]:
    """What it was measured on."""
    with open("/proc/cpuinfo", encoding="ascii") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else "unknown",
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
