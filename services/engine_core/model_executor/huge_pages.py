"""Asks the kernel for pages of 2 MiB under what a step reads from end to end: weights and KV cache on a CPU.

With pages of 4 KiB a core that streams weights looks up an address every 64 cache lines, and waits for it often. The
kernel decides; without such pages everything works as before, slower.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Iterable

import torch

_PAGE = 2 << 20
# Of linux/mman.h, since Linux 6.1: at once, also what is written already. Python has no name for it yet.
_MADV_COLLAPSE = 25

_log = logging.getLogger(__name__)


def use_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """For the memory under the tensors that lie on a CPU, and what else lies in its pages; contents stay.

    Memory nobody has written to takes no page now, but will get one of these.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for begin, end in _pages_under(tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes):
        for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
            if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) != 0:
                # Some page of the range could not be had, or the kernel has none: those that could be are there.
                _log.debug("madvise %d of %d bytes: %s", advice, end - begin, os.strerror(ctypes.get_errno()))


def _pages_under(tensors: Iterable[torch.Tensor]) -> Iterable[tuple[int, int]]:
    """Begin and end of each run of huge pages that hold something of a tensor."""
    runs: list[list[int]] = []
    for begin, num_bytes in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        first, end = begin // _PAGE * _PAGE, -(-(begin + num_bytes) // _PAGE) * _PAGE
        if runs and first <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([first, end])
    return [(begin, end) for begin, end in runs]
