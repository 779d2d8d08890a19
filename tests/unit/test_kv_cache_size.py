"""How many blocks are allocated on a CPU, and what is said when none fits."""

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

    return kv_cache_size.determine_num_blocks(EngineSettings(**settings), block_bytes, torch.device("cpu"), no_profile)


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
