"""How many blocks are allocated, and what is said when none fits. A GPU is a few numbers here."""

from __future__ import annotations

import pytest
import torch

from engine_core.config import EngineSettings
from engine_core.model_executor import kv_cache_size
from engine_core.model_executor.host_memory import GIB
from engine_core.model_executor.startup_error import StartupError


@pytest.fixture(autouse=True)
def five_gib_free(monkeypatch):
    monkeypatch.setattr(kv_cache_size, "available_bytes", lambda: 5 * GIB)


def num_blocks(block_bytes: int = 1 << 20, **settings) -> int:
    def no_profile() -> None:
        pytest.fail("a CPU is not profiled")

    cpu = torch.device("cpu")
    return kv_cache_size.determine_num_blocks(
        EngineSettings(**settings), block_bytes, cpu, no_profile, no_profile, no_profile
    )


def test_a_share_of_free_memory_by_default():
    assert num_blocks() == 2 * 1024


def test_never_more_than_the_limit_by_default(monkeypatch):
    monkeypatch.setattr(kv_cache_size, "available_bytes", lambda: 100 * GIB)
    assert num_blocks() == 4 * 1024


def test_the_flag_decides():
    assert num_blocks(kv_cache_memory="64MiB") == 64


def test_forced_number():
    assert num_blocks(num_blocks=7, kv_cache_memory="64MiB") == 7


@pytest.mark.parametrize("settings", [{"num_blocks": 1}, {"kv_cache_memory": "1MiB"}, {"kv_cache_memory": "0"}])
def test_nothing_fits(settings):
    flag = "--" + next(iter(settings)).replace("_", "-")
    with pytest.raises(StartupError, match=flag):
        num_blocks(**settings)


def test_a_block_larger_than_memory():
    with pytest.raises(StartupError, match=r"2 blocks of 16 tokens need 6\.00 GiB and 2\.00 GiB are to be had"):
        num_blocks(3 * GIB)


def test_more_than_there_is():
    with pytest.raises(StartupError, match=r"--kv-cache-memory 6GiB: only 5\.00 GiB of memory are free"):
        num_blocks(kv_cache_memory="6GiB")


def test_ill_formed_size():
    with pytest.raises(StartupError, match="--kv-cache-memory: 'lots' is not a size"):
        num_blocks(kv_cache_memory="lots")


class FakeGpu:
    """10 GiB, of which another process holds one and the weights take two."""

    def __init__(self) -> None:
        self.total, self.others, self.held = 10 * GIB, GIB, 2 * GIB
        self.peak = 0

    def run_largest_step(self) -> None:
        self.peak = self.held + GIB // 2

    def record_graphs(self) -> None:
        self.held += GIB

    def drop_graphs(self) -> None:
        self.held -= GIB

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.total - self.others - self.held, self.total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.held)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peak)


def test_a_gpu_keeps_room_for_the_largest_step_and_for_recorded_ones(monkeypatch):
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    found = kv_cache_size.determine_num_blocks(
        EngineSettings(gpu_memory_utilization=0.9),
        1 << 20,
        torch.device("cuda"),
        gpu.run_largest_step,
        gpu.record_graphs,
        gpu.drop_graphs,
    )
    # Of 9 GiB: 2.5 at the peak, 1 of others, 1 of graphs.
    assert found == int(4.5 * 1024)
    assert gpu.held == 2 * GIB
