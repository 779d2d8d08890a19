"""Pages of 2 MiB under tensors that a step reads from end to end."""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine_core.model_executor.huge_pages import use_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not SETTING.is_file() or "[madvise]" not in SETTING.read_text(), reason="the kernel does not leave it to programs"
)


@pytest.fixture
def memory() -> mmap.mmap:
    """32 MiB with nothing else in them."""
    return mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def middle_of(memory: mmap.mmap) -> torch.Tensor:
    """16 MiB, so that whatever lies beside the memory shares no mapping with them."""
    return torch.frombuffer(memory, dtype=torch.int32, count=4 * MIB, offset=8 * MIB)


def huge_bytes_at(address: int) -> int:
    """In huge pages, of the mapping that holds the address."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(match[1], 16) <= address < int(match[2], 16)
        elif is_there and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("nothing is mapped there")


def test_what_is_written_already_moves_and_stays_what_it_is(memory: mmap.mmap) -> None:
    written, numbers = middle_of(memory), torch.arange(4 * MIB, dtype=torch.int32)
    written.copy_(numbers)
    middle = written.data_ptr() + 8 * MIB
    assert huge_bytes_at(middle) == 0
    use_huge_pages([written], are_written=True)
    assert huge_bytes_at(middle) >= 14 * MIB
    assert torch.equal(written, numbers)


def test_what_nobody_has_written_to_takes_no_memory_yet_and_huge_pages_then(memory: mmap.mmap) -> None:
    untouched = middle_of(memory)
    use_huge_pages([untouched], are_written=False)
    middle = untouched.data_ptr() + 8 * MIB
    assert huge_bytes_at(middle) == 0
    untouched.fill_(1)
    assert huge_bytes_at(middle) >= 14 * MIB


def test_small_tensors_and_none_at_all_are_borne() -> None:
    few = torch.ones(3)
    use_huge_pages([few, torch.empty(0), torch.empty(4, device="meta")], are_written=True)
    use_huge_pages([], are_written=True)
    assert few.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("reason", "num_asked"), [(errno.ENOMEM, 1), (errno.EINVAL, 8)])
def test_memory_in_pieces_ends_the_exchange_and_a_page_that_can_not_be_had_does_not(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, reason: int, num_asked: int
) -> None:
    asked: list[int] = []

    def madvise(page: ctypes.c_void_p, num_bytes: ctypes.c_size_t, advice: int) -> int:
        if advice == mmap.MADV_HUGEPAGE:
            return 0
        asked.append(page.value or 0)
        ctypes.set_errno(reason)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(madvise=madvise))
    begin = (torch.frombuffer(memory, dtype=torch.uint8).data_ptr() + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
    offset = begin - torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    use_huge_pages([torch.frombuffer(memory, dtype=torch.uint8, count=16 * MIB, offset=offset)], are_written=True)
    assert asked == [begin + number * 2 * MIB for number in range(num_asked)]
