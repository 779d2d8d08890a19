"""Sizes as operators write them, and the memory a container leaves."""

from __future__ import annotations

import psutil
import pytest

from engine_core.model_executor.host_memory import available_bytes, parse_size, return_freed_memory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        (" 1.5 gib ", 3 << 29),
        ("3GB", 3_000_000_000),
        ("10kB", 10_000),
        ("1TiB", 1 << 40),
        ("4096", 4096),
        ("7B", 7),
        ("0", 0),
    ],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "two", "-1GiB", "1GiBs", "1 G i B", "0x10", "1e9", "1,5GiB", "2G"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size like 2GiB"):
        parse_size(text)


def test_a_container_limit_counts(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_bytes(tmp_path) == 600_000
    (tmp_path / "memory.current").write_text("1000001\n")
    assert available_bytes(tmp_path) == 0


@pytest.mark.parametrize("limit", ["max\n", None])
def test_no_container_limit(tmp_path, limit):
    if limit:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("1\n")
    assert 0 < available_bytes(tmp_path) <= psutil.virtual_memory().total


def test_freed_memory_is_given_back():
    process = psutil.Process()
    # Small enough to come from the heap, which shrinks only from its end: that one stays in use.
    blocks = [bytearray(100_000) for _ in range(2000)]
    last = bytearray(100_000)
    del blocks
    held = process.memory_info().rss
    return_freed_memory()
    assert process.memory_info().rss < held - 100_000_000
    assert len(last) == 100_000
