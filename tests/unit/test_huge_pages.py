"""Pages of 2 MiB under tensors that a step reads from end to end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from engine_core.model_executor.huge_pages import use_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not SETTING.is_file() or "[never]" in SETTING.read_text(), reason="the kernel gives no huge pages"
)


def huge_bytes_at(address: int) -> int:
    """In huge pages, of the mapping that holds the address."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(match[1], 16) <= address < int(match[2], 16)
        elif is_there and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("nothing is mapped there")


def test_what_is_written_already_moves_and_stays_what_it_is() -> None:
    written = torch.arange(16 * MIB // 4, dtype=torch.int32)
    before = huge_bytes_at(written.data_ptr())
    use_huge_pages([written])
    # Both ends share their pages with other memory, which may not be there.
    assert huge_bytes_at(written.data_ptr() + 8 * MIB) - before >= 12 * MIB
    assert torch.equal(written, torch.arange(16 * MIB // 4, dtype=torch.int32))


def test_what_nobody_has_written_to_takes_no_memory_yet_and_huge_pages_then() -> None:
    untouched = torch.empty(64 * MIB, dtype=torch.uint8)
    use_huge_pages([untouched])
    middle = untouched.data_ptr() + 32 * MIB
    before = huge_bytes_at(middle)
    assert before < 32 * MIB
    untouched.fill_(1)
    assert huge_bytes_at(middle) - before >= 32 * MIB


def test_small_tensors_and_none_at_all_are_borne() -> None:
    few = torch.ones(3)
    use_huge_pages([few, torch.empty(0), torch.empty(4, device="meta")])
    use_huge_pages([])
    assert few.tolist() == [1, 1, 1]
