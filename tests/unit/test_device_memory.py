"""The memory of a device as an engine serves it: by kind, looked at seldom, and never in the way of a scrape."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine_core.config import EngineSettings
from engine_core.metrics import EngineView, engine
from engine_core.metrics.recent_memory import REFRESH_S, RecentMemory
from engine_core.model_executor.executor import DeviceMemory
from engine_core.model_executor.host_memory import available_bytes
from engine_core.model_executor.in_process_executor import InProcessExecutor
from engine_core.operations import PauseMode, Sleep, SleepLevel
from fakes.looped_engine import LoopedEngine


def memory_of(looped: LoopedEngine, memory: RecentMemory | None = None) -> dict[str, float]:
    view = EngineView(
        "engine",
        looped.lifecycle,
        SimpleNamespace(),
        SimpleNamespace(),
        proc=looped.proc,
        memory=memory or RecentMemory(),
    )
    (family,) = (one for one in engine.collect(view) if one.name.endswith("device_memory_bytes"))
    return {sample.labels["kind"]: sample.value for sample in family.samples}


def kv_cache_bytes(looped: LoopedEngine) -> int:
    config = looped.proc.core.config
    return config.num_blocks * config.block_size * config.model_info.kv_bytes_per_token


def test_what_nobody_can_tell_is_not_served() -> None:
    looped = LoopedEngine()
    held = {"weights": 0, "kv_cache": kv_cache_bytes(looped)}
    assert memory_of(looped) == {**held, "free": 3000}
    looped.executor.memory = DeviceMemory()
    assert memory_of(looped) == held


def test_the_peak_without_what_is_always_there_is_what_steps_take() -> None:
    looped = LoopedEngine()
    looped.executor.memory = DeviceMemory(free_bytes=1, peak_bytes=kv_cache_bytes(looped) + 777)
    assert memory_of(looped)["activations"] == 777
    # A sleep does not make activations of what was given back.
    looped.call(Sleep(SleepLevel.DISCARD_ALL, PauseMode.KEEP))
    asleep = memory_of(looped)
    assert (asleep["kv_cache"], asleep["activations"]) == (0, 777)


def test_the_device_is_looked_at_every_ten_seconds_at_most() -> None:
    looped, now = LoopedEngine(), [100.0]
    memory = RecentMemory(lambda: now[0])
    for _ in range(3):
        memory_of(looped, memory)
    assert looped.executor.num_looks == 1
    looped.executor.memory = DeviceMemory(free_bytes=5)
    now[0] += REFRESH_S - 1
    assert memory_of(looped, memory)["free"] == 3000
    now[0] += 1
    assert memory_of(looped, memory)["free"] == 5
    assert looped.executor.num_looks == 2


def executor_on(device: str) -> InProcessExecutor:
    """Without a model: the look needs none."""
    executor = InProcessExecutor.__new__(InProcessExecutor)
    executor._settings, executor._device = EngineSettings(), torch.device(device)
    return executor


def test_on_a_cpu_what_is_free_is_what_host_or_container_leave() -> None:
    look = executor_on("cpu").device_memory()
    assert look.peak_bytes is None
    assert look.free_bytes == pytest.approx(available_bytes(), rel=0.2)


def test_on_a_gpu_the_driver_and_torch_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 100))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 55)
    assert executor_on("cuda").device_memory() == DeviceMemory(40, 55)


def test_a_gpu_that_is_lost_spoils_no_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: device lost")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert executor_on("cuda").device_memory() == DeviceMemory()
